"""An engine whose requests are all paused rests, and is awake at once."""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest
from served.client import Client, cancelled
from served.record import Excerpt
from served.server import Server, cpu_seconds

PAUSED_STREAMS = 20
REST_SECONDS = 20
PAIRS = 15
SETTLE_SECONDS = 0.4
DEADLINE_SECONDS = 20

_new_user = map("newcomer-{}".format, count())


@dataclass(frozen=True)
class Rest:
    """Twenty seconds in which everybody is paused."""

    seconds: float
    cpu_seconds: float
    paused: float
    excerpt: Excerpt


@pytest.fixture(scope="module")
def rest(servers: dict[str, Server]) -> Rest:
    """One user at 0.01 tokens/s with twenty streams: one token, then nothing for 100 s."""
    return asyncio.run(_rest(servers["roomy"]))


async def _rest(server: Server) -> Rest:
    processes = server.engine_processes()
    async with Client(server.url) as client, _PausedStreams(server, client):
        await asyncio.sleep(2)  # a worker spins for a second after its last step
        start, before = server.record.position(), cpu_seconds(processes)
        start_seconds = time.monotonic()
        await asyncio.sleep(REST_SECONDS)
        seconds = time.monotonic() - start_seconds
        used, excerpt = cpu_seconds(processes) - before, server.record.since(start)
        return Rest(seconds, used, server.metrics()["vllm_pacer:paused_requests"], excerpt)


class _PausedStreams:
    """Streams of a new user, all paused while the context lasts."""

    def __init__(self, server: Server, client: Client) -> None:
        self._server = server
        self._client = client

    async def __aenter__(self) -> None:
        user = next(_new_user)
        start = self._server.record.position()
        self._tasks = [
            asyncio.create_task(self._client.complete(user, f"{user} {index}", 100))
            for index in range(PAUSED_STREAMS)
        ]
        await _until(lambda: self._paused_since(start) == PAUSED_STREAMS)

    async def __aexit__(self, *_: object) -> None:
        start = self._server.record.position()
        await cancelled(self._tasks)
        await _until(lambda: len(self._server.record.since(start).aborted) == PAUSED_STREAMS)

    def _paused_since(self, start: int) -> int:
        steps = self._server.record.since(start).steps
        return int(steps[-1]["paused"]) if steps else 0


async def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_everybody_is_paused(rest: Rest) -> None:
    """What is measured is what it should be: twenty requests paused, none computed."""
    assert rest.paused == PAUSED_STREAMS
    assert not any(step["computed"] for step in rest.excerpt.steps)


def test_schedule_calls_while_all_are_paused(rest: Rest) -> None:
    """The engine calls `schedule()` at most 25 times a second."""
    calls_per_second = len(rest.excerpt.steps) / rest.seconds
    print(f"{calls_per_second:.1f} calls a second")
    assert calls_per_second <= 25


def test_processor_time_while_all_are_paused(rest: Rest) -> None:
    """Engine and workers together use less than 6 % of a core."""
    load = rest.cpu_seconds / rest.seconds
    print(f"{load:.2%} of a core")
    assert load < 0.06


def test_first_token_beside_paused_requests(roomy: Server) -> None:
    """A new user's first token comes within 10 ms of an idle engine's (medians of 15)."""
    beside_paused, idle = asyncio.run(_first_tokens(roomy))
    assert len(beside_paused) == len(idle) == PAIRS
    print("first token beside paused requests, ms:", beside_paused)
    print("first token of an idle engine, ms:", idle)
    later_ms = statistics.median(beside_paused) - statistics.median(idle)
    print(f"{later_ms:.2f} ms later")
    assert later_ms <= 10


async def _first_tokens(server: Server) -> tuple[list[float], list[float]]:
    beside_paused, idle = [], []
    async with Client(server.url) as client:
        for _ in range(PAIRS):
            async with _PausedStreams(server, client):
                await asyncio.sleep(SETTLE_SECONDS)
                beside_paused.append(await _first_token_ms(client))
            await asyncio.sleep(SETTLE_SECONDS)
            idle.append(await _first_token_ms(client))
    return beside_paused, idle


async def _first_token_ms(client: Client) -> float:
    start_ns = time.monotonic_ns()
    answer = await client.complete(next(_new_user), "Who is there?", 1)
    assert len(answer.arrivals_ns) == 1
    return (answer.arrivals_ns[0] - start_ns) / 1e6


def test_metrics_show_who_is_paused(roomy: Server) -> None:
    """`/metrics` counts the paused requests while they wait, and none after they are gone."""
    asyncio.run(_paused_in_metrics(roomy))


async def _paused_in_metrics(server: Server) -> None:
    name = "vllm_pacer:paused_requests"
    async with Client(server.url) as client:
        async with _PausedStreams(server, client):
            assert server.metrics()[name] == PAUSED_STREAMS
        await _until(lambda: server.metrics()[name] == 0)


def test_abort_while_paused_frees_at_once(roomy: Server) -> None:
    """When clients of paused requests hang up, slot and KV are free before the next step."""
    excerpt = asyncio.run(_abort_paused(roomy))
    gone = [line for line in excerpt.lines if line.get("aborted")][-1]
    assert len(excerpt.aborted) == PAUSED_STREAMS
    assert (gone["resident"], gone["paused"]) == (0, 0)
    # An engine that rests takes no step afterwards; what is free in all was seen before.
    assert gone["free_blocks"] == max(line["free_blocks"] for line in roomy.record.since().steps)
    assert gone["free_blocks"] > min(step["free_blocks"] for step in excerpt.steps)


async def _abort_paused(server: Server) -> Excerpt:
    start = server.record.position()
    async with Client(server.url) as client, _PausedStreams(server, client):
        pass
    return server.record.settled_since(start)
