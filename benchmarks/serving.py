"""What clients of the served engine see: users at their limits, and throughput beside stock.

For the throughput both servers stay up and take turns, best of many runs each: the machine's noise
only ever makes a run slower, so the best runs are what can be compared.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
from served.client import Client, arrivals_of
from served.server import API_SERVER, LANES, Server, launched, wait_until_ready

VERSION = "0.32.0"
PROCESS_PAIRS = 3  # where a process happens to lie in memory is worth some hundredths
RUNS = 12  # of each pair
STREAMS = 16
TOKENS = 120
FAR_AWAY = ("--default-user-output-tokens-per-second", "1000000")

BURST_SECONDS = 0.1
LIMITED = {"one stream": (20, 1, 600), "four streams": (20, 4, 150), "two streams": (100, 2, 1500)}
"""By user: limit, streams and tokens per stream."""


def _tokens_per_second(server: Server) -> float:
    """Measure one run. Whole answers: to stream them would load the machine with other things."""

    def complete(number: int) -> int:
        status, body = server.post(
            "/v1/completions",
            {
                "model": "m",
                "prompt": [1, 2 + number],  # no text: a model may have been cut to fewer words
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "vllm_xargs": {"output_rate_user": f"user-{number}"},
            },
        )
        assert status == 200, body
        return int(json.loads(body)["usage"]["completion_tokens"])

    with ThreadPoolExecutor(STREAMS) as pool:
        start = time.perf_counter()
        tokens = sum(pool.map(complete, range(STREAMS)))
        seconds = time.perf_counter() - start
    assert tokens == STREAMS * TOKENS
    return tokens / seconds


@contextmanager
def _alone(server: Server, servers: Iterable[Server]) -> Iterator[None]:
    """Stop the other servers for a while: a worker that has nothing to do spins for a second."""
    others = [
        process
        for other in servers
        if other is not server
        for process in [*psutil.Process(other.process.pid).children(recursive=True)]
    ]
    for process in others:
        process.suspend()
    try:
        yield
    finally:
        for process in others:
            process.resume()


def throughput(
    lane: str,
    limits: Sequence[str] = FAR_AWAY,
    both: Sequence[str] = (),
    run: Callable[[Server], float] = _tokens_per_second,
) -> dict[str, Any]:
    """Measure stock and ours in one lane, in turns.

    Args:
        lane: `sync` or `async`.
        limits: The flags that only ours has.
        both: The flags that both have.
        run: Measures a server's throughput.

    """
    runs: dict[str, list[float]] = {"stock": [], "ours": []}
    for _ in range(PROCESS_PAIRS):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            servers = {}
            for name, args in (("stock", both), ("ours", (*both, *limits))):
                path = Path(folder) / name
                path.mkdir()
                servers[name] = stack.enter_context(
                    launched(path, VERSION, lane, API_SERVER, *args, is_recorded=False)
                )
            for server in servers.values():
                wait_until_ready(server)
                run(server)
            for _ in range(RUNS):
                for name, server in servers.items():
                    with _alone(server, servers.values()):
                        runs[name].append(run(server))
    best = {name: max(values) for name, values in runs.items()}
    return {
        "scheduling": lane,
        "tokens_per_second": runs,
        "runs": len(runs["stock"]),
        "best_stock": best["stock"],
        "best_ours": best["ours"],
        "ratio": best["ours"] / best["stock"],
    }


async def _limited_users(server: Server) -> list[dict[str, Any]]:
    async with Client(server.url) as client:
        answers = {
            user: [client.complete(user, "Hello", tokens, ignore_eos=True) for _ in range(streams)]
            for user, (_, streams, tokens) in LIMITED.items()
        }
        every = await asyncio.gather(*(each for calls in answers.values() for each in calls))
    rows = []
    for user, (limit, streams, _) in LIMITED.items():
        arrivals = arrivals_of([answer for answer in every if answer.user == user])
        paced = arrivals[int(BURST_SECONDS * limit) + 1 :]  # the tokens after the burst
        seconds = (paced[-1] - paced[0]) / 1e9
        rate = (len(paced) - 1) / seconds
        rows.append({"limit": limit, "streams": streams, "tokens": len(paced), "rate": rate})
    return rows


def rates(lane: str) -> list[dict[str, Any]]:
    """Measure the speed of users at their limits, all at once, in one lane."""
    limits = json.dumps({user: limit for user, (limit, _, _) in LIMITED.items()})
    flags = ("--default-user-output-tokens-per-second", "null")
    with tempfile.TemporaryDirectory() as folder:
        args = (*flags, "--user-output-tokens-per-second", limits)
        with launched(Path(folder), VERSION, lane, API_SERVER, *args) as server:
            wait_until_ready(server)
            _tokens_per_second(server)
            rows = asyncio.run(_limited_users(server))
    return [{"scheduling": lane, **row} for row in rows]


def measure() -> dict[str, Any]:
    """Run all measurements."""
    return {
        "rates": [row for lane in LANES for row in rates(lane)],
        "throughput": [throughput(lane) for lane in LANES],
    }
