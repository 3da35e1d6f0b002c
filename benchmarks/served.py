"""What clients of the served engine see: users at their limits, and throughput beside stock.

For the throughput both servers stay up and take turns, best of many runs each: the machine's noise
only ever makes a run slower, so the best runs are what can be compared.
"""

import asyncio
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "e2e"), str(ROOT / "tools")]

from served.client import Client, arrivals_of  # noqa: E402
from served.server import API_SERVER, LANES, Server, launched, wait_until_ready  # noqa: E402

VERSION = "0.32.0"
RUNS = 12
STREAMS = 16
TOKENS = 160
FAR_AWAY = ("--default-user-output-tokens-per-second", "1000000")

BURST_SECONDS = 0.1
LIMITED = {"one stream": (20, 1, 210), "four streams": (20, 4, 53), "two streams": (100, 2, 210)}
"""By user: limit, streams and tokens per stream."""


async def _tokens_per_second(server: Server) -> float:
    async with Client(server.url) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.complete(f"user-{index}", f"Hello {index}", TOKENS, ignore_eos=True)
                for index in range(STREAMS)
            )
        )
        seconds = time.perf_counter() - start
    assert all(len(answer.token_ids) == TOKENS for answer in answers)
    return STREAMS * TOKENS / seconds


def throughput(lane: str) -> dict[str, Any]:
    """Measure stock and ours in one lane, in turns."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = {}
        for name, args in (("stock", ()), ("ours", FAR_AWAY)):
            path = Path(folder) / name
            path.mkdir()
            servers[name] = stack.enter_context(launched(path, VERSION, lane, API_SERVER, *args))
        for server in servers.values():
            wait_until_ready(server)
            asyncio.run(_tokens_per_second(server))
        runs: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(RUNS):
            for name, server in servers.items():
                runs[name].append(asyncio.run(_tokens_per_second(server)))
    best = {name: max(values) for name, values in runs.items()}
    return {
        "scheduling": lane,
        "tokens_per_second": runs,
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
            asyncio.run(_tokens_per_second(server))
            rows = asyncio.run(_limited_users(server))
    return [{"scheduling": lane, **row} for row in rows]


def measure() -> dict[str, Any]:
    """Run all measurements."""
    return {
        "rates": [row for lane in LANES for row in rates(lane)],
        "throughput": [throughput(lane) for lane in LANES],
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
