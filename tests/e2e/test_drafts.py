"""Speculative decoding, served: drafts are looked up in the prompt and in what was generated."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from served.client import Answer, Prompt, ask
from served.rates import rate_of
from served.record import Excerpt
from served.server import API_SERVER, Server, launched, wait_until_ready
from test_windows import BURST_NS, ns_over_quota

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
RATE = 20
STREAMS = 4
SECONDS = 15
PROMPTS: list[Prompt] = ["Hello", [17], [40, 41, 42, 43] * 20, list(range(900, 1100)), [5] * 64]


@pytest.fixture(scope="module")
def server(vllm_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that drafts four tokens at a time; vLLM cannot look them up asynchronously."""
    command = (
        *("--default-user-output-tokens-per-second", "null"),
        *("--user-output-tokens-per-second", json.dumps({"limited": RATE, "texts": 150})),
        *("--speculative-config", json.dumps(DRAFTS)),
    )
    folder = tmp_path_factory.mktemp("drafts")
    with launched(folder, vllm_version, "sync", API_SERVER, *command) as server:
        wait_until_ready(server)
        yield server


@dataclass(frozen=True)
class Texts:
    """The same prompts without a limit and with one."""

    free: list[Answer]
    limited: list[Answer]
    excerpt: Excerpt


@pytest.fixture(scope="module")
def texts(server: Server) -> Texts:
    """Ask everything twice, all at once."""
    start = server.record.position()
    free = ask(server.url, "free", PROMPTS, 60)
    excerpt = server.record.settled_since(start)
    return Texts(free, ask(server.url, "texts", PROMPTS, 60), excerpt)


@pytest.fixture(scope="module")
def run(server: Server) -> Excerpt:
    """What the engine did for a limited user with four streams."""
    start = server.record.position()
    prompts: list[Prompt] = [f"stream {index}" for index in range(STREAMS)]
    ask(server.url, "limited", prompts, RATE * SECONDS // STREAMS)
    return server.record.settled_since(start)


def test_drafts_are_accepted(texts: Texts) -> None:
    """Without a limit several tokens come out of a step, so this is about something."""
    most = max(tokens for output in texts.excerpt.outputs for tokens in output["emitted"].values())
    assert most == 1 + DRAFTS["num_speculative_tokens"]


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_text_is_the_same(texts: Texts, index: int) -> None:
    """At temperature 0 the paused request gives the tokens and text of the unlimited one."""
    free, limited = texts.free[index], texts.limited[index]
    assert limited.token_ids == free.token_ids
    assert limited.text == free.text


def test_rate_is_the_limit(run: Excerpt) -> None:
    """With drafts, too, tokens come at the limit within 0.5 % from behind the burst on."""
    rate = rate_of(run.emission_ns_by_user()["limited"], run.steps_ns, RATE)
    rate.check(RATE, least_tokens=200)


def test_dispatched_tokens_in_every_window(run: Excerpt) -> None:
    """On dispatch stamps no window of W seconds holds more than (W + burst) x N + 1 tokens."""
    assert ns_over_quota(run.dispatch_ns_by_user()["limited"], RATE) <= BURST_NS


def test_charges_are_what_came_out(run: Excerpt) -> None:
    """All that was taken for rejected drafts has been given back."""
    charged = run.charged_by_user["limited"] - run.refunded_by_user["limited"]
    assert charged == run.emitted_by_user["limited"] == RATE * SECONDS
