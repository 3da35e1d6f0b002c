"""Two workers that compute a step together: users get their rates, and the same texts."""

import json
from collections.abc import Iterator

import pytest
from served.client import ask
from served.rates import rate_of
from served.record import Excerpt
from served.server import API_SERVER, Server, launched, wait_until_ready

RATE = 20
SECONDS = 15
TEXT_TOKENS = 40
PROMPTS = ("Hello", "Once upon a time", "The end")


@pytest.fixture(scope="module")
def server(vllm_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a worker on each of two cores."""
    folder = tmp_path_factory.mktemp("tensor-parallel")
    command = (
        *("--default-user-output-tokens-per-second", "null"),
        *("--user-output-tokens-per-second", json.dumps({"limited": RATE, "texts": 30})),
        *("--tensor-parallel-size", "2"),
    )
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PACER_PROBE_WORKERS_REST": "1"}
    with launched(
        folder, vllm_version, "sync", API_SERVER, *command, variables=variables
    ) as server:
        wait_until_ready(server)
        yield server


@pytest.fixture(scope="module")
def run(server: Server) -> Excerpt:
    """What the engine did for two streams of a limited user."""
    start = server.record.position()
    ask(server.url, "limited", PROMPTS[:2], RATE * SECONDS // 2)
    return server.record.settled_since(start)


def test_there_are_two_workers(server: Server) -> None:
    """What is measured is what it should be."""
    names = [process.name() for process in server.engine_processes()]
    assert sum("Worker" in name for name in names) == 2


def test_rate_is_the_limit(run: Excerpt) -> None:
    """Tokens come at the limit within 0.5 % from the end of the burst on."""
    rate = rate_of(run.emission_ns_by_user()["limited"], run.steps_ns, RATE)
    rate.check(RATE, least_tokens=200)


def test_text_is_the_same(server: Server) -> None:
    """At temperature 0 paused requests give the tokens of unlimited ones."""
    free, limited = (ask(server.url, user, PROMPTS, TEXT_TOKENS) for user in ("free", "texts"))
    assert [answer.token_ids for answer in limited] == [answer.token_ids for answer in free]
