"""KV blocks that come from elsewhere, served: prompts are stored, and loaded when they come again.

Prefix caching is off, so a prompt that comes again is loaded or computed.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from served.client import Answer, Prompt, ask
from served.rates import rate_of
from served.record import Excerpt
from served.server import API_SERVER, Server, launched, wait_until_ready
from test_windows import BURST_NS, ns_over_quota

CONNECTOR = {
    "kv_connector": "StoreConnector",
    "kv_connector_module_path": "kv_store",
    "kv_role": "kv_both",
}
RATE = 20
STREAMS = 4
SECONDS = 12
BLOCK = 32
PROMPTS: list[Prompt] = [
    [*range(500 + 10 * each, 500 + 10 * each + 8 * BLOCK + each)] for each in range(8)
]


@pytest.fixture(scope="module")
def server(vllm_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that keeps the KV blocks of all prompts, with two steps in flight."""
    command = (
        *("--default-user-output-tokens-per-second", "null"),
        *("--user-output-tokens-per-second", json.dumps({"limited": RATE, "texts": 150})),
        *("--kv-transfer-config", json.dumps(CONNECTOR)),
        *("--no-enable-prefix-caching", "--block-size", str(BLOCK)),
    )
    folder = tmp_path_factory.mktemp("kv")
    with launched(folder, vllm_version, "async", API_SERVER, *command) as server:
        wait_until_ready(server)
        yield server


@dataclass(frozen=True)
class Texts:
    """The same prompts computed, and loaded without a limit and with one."""

    computed: list[Answer]
    loaded: list[Answer]
    limited: list[Answer]
    loaded_tokens: float


def loaded_tokens(server: Server) -> float:
    """Return how many tokens of prompts have been loaded, by vLLM's own counter."""
    return sum(
        float(line.rpartition(" ")[2])
        for line in server.get("/metrics").splitlines()
        if line.startswith("vllm:external_prefix_cache_hits_total")
    )


@pytest.fixture(scope="module")
def texts(server: Server) -> Texts:
    """Ask everything three times, all at once."""
    computed, loaded, limited = (
        ask(server.url, user, PROMPTS, 40) for user in ("free", "free", "texts")
    )
    return Texts(computed, loaded, limited, loaded_tokens(server))


@pytest.fixture(scope="module")
def run(server: Server, texts: Texts) -> Excerpt:
    """What the engine did for a limited user with four streams, whose prompts are loaded."""
    start = server.record.position()
    ask(server.url, "limited", PROMPTS[:STREAMS], RATE * SECONDS // STREAMS)
    return server.record.settled_since(start)


def test_prompts_are_loaded(texts: Texts) -> None:
    """All prompts are loaded both times that they come again, so this is about something."""
    assert texts.loaded_tokens >= 2 * sum((len(each) - 1) // BLOCK * BLOCK for each in PROMPTS)


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_text_is_the_same(texts: Texts, index: int) -> None:
    """At temperature 0 a prompt that is loaded gives the same tokens, paused or not."""
    assert texts.loaded[index].token_ids == texts.computed[index].token_ids
    assert texts.limited[index].token_ids == texts.computed[index].token_ids


def test_rate_is_the_limit(run: Excerpt) -> None:
    """With prompts that are loaded, too, tokens come at the limit within 0.5 %."""
    rate = rate_of(run.emission_ns_by_user()["limited"], run.steps_ns, RATE)
    rate.check(RATE, least_tokens=200)


def test_dispatched_tokens_in_every_window(run: Excerpt) -> None:
    """On dispatch stamps no window of W seconds holds more than (W + burst) x N + 1 tokens."""
    assert ns_over_quota(run.dispatch_ns_by_user()["limited"], RATE) <= BURST_NS


def test_charges_are_what_came_out(run: Excerpt) -> None:
    """A prompt that is loaded costs nothing."""
    charged = run.charged_by_user["limited"] - run.refunded_by_user["limited"]
    assert charged == run.emitted_by_user["limited"] == RATE * SECONDS
