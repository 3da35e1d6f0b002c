"""What users get who share an engine: of its time, its KV cache, its positions and its slots.

A quiet user beside long prompts, and beside a neighbour that holds all KV blocks; nine beside one
that opens many streams; and users with weights that all have more to do than there is room for.
"""

import asyncio
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from served.client import Answer, Client, cancelled
from served.record import Excerpt
from served.server import Server

from isolation import (
    COMPARED_REQUESTS,
    LIMITS,
    MODEL,
    RUNS,
    SIZES,
    engine,
    latencies,
    limits_in,
    neighbour,
    percentile,
    phase,
    prompt,
    quiet,
    ratios,
)
from serving import throughput

SHARE_SECONDS = 30
RUN_SECONDS = 3
WEIGHTS = {"one": 1, "two": 2, "four": 4}


def beside_long_prompts() -> list[dict]:
    """Measure the quiet user beside prompts of four chunks each, and the steps with a chunk."""
    rows = []
    with engine(LIMITS, "--max-num-batched-tokens", "256") as server:
        asyncio.run(phase(server, 0))
        for run in range(RUNS):
            measured = asyncio.run(phase(server, 64, 800))
            chunk = chunk_steps_ms(measured.excerpt)
            row = {"run": run, **measured.row, **most_chunks(measured.excerpt, "quiet")}
            row["chunk_p50_ms"], row["chunk_p99_ms"] = median(chunk), percentile(chunk, 99)
            rows.append(row)
            print(row, flush=True)
    return rows


def chunk_steps_ms(excerpt: Excerpt) -> list[float]:
    """Return how long the steps took in which part of a prompt was computed."""
    ended_ns = {output["output_of"]: output["at_ns"] for output in excerpt.outputs}
    return [
        (ended_ns[step["step"]] - step["at_ns"]) / 1e6
        for step in excerpt.steps
        if step["computed"] > len(step["sampled"]) and step["step"] in ended_ns
    ]


def most_chunks(excerpt: Excerpt, user: str) -> dict[str, int]:
    """Return how many chunks of prompts were computed at most in the steps up to a user's token.

    Counted from when the scheduler knows of the request, so without the step in progress then, or
    from the token before. The last chunk of a prompt samples, and is not counted.
    """
    chunks_of: dict[str, int] = {}
    first, later = [0], [0]
    begun: set[str] = set()
    for line in excerpt.lines:
        if line.get("user") == user:
            chunks_of[line["request"]] = 0
        if "step" in line:
            chunks = line["computed"] - len(line["sampled"])
            chunks_of = {request: before + chunks for request, before in chunks_of.items()}
            for request in chunks_of.keys() & line["sampled"]:
                (later if request in begun else first).append(chunks_of[request])
                begun.add(request)
                chunks_of[request] = 0
        for request in line.get("finished", ()):
            chunks_of.pop(request, None)
    return {"most_chunks_to_first": max(first), "most_chunks_in_gap": max(later)}


def beside_full_cache() -> list[dict]:
    """Measure the quiet user while paused residents hold all KV blocks and slots are free."""
    rows = []
    compared = partial(phase, requests=COMPARED_REQUESTS)
    with engine(LIMITS, "--num-gpu-blocks-override", "41", "--block-size", "128") as server:
        asyncio.run(phase(server, 0))
        for run in range(RUNS):
            one = asyncio.run(compared(server, 1)).row
            # Long answers, so that what fills the cache are residents and not their prompts.
            row = asyncio.run(compared(server, 16, 300, tokens=300)).row
            rows.append({"run": run, **row, **ratios(row, one)})
            print(rows[-1], flush=True)
    return rows


async def ten(server: Server, streams: int) -> dict[str, list[Answer]]:
    """Run nine quiet users beside one with so many streams."""
    async with Client(server.url) as client, neighbour(client, streams, 1, tokens=2000):
        users = [f"quiet-{number}" for number in range(9)]
        answers = await asyncio.gather(*(quiet(client, 40, user) for user in users))
    return dict(zip(users, answers, strict=True))


def ten_users() -> list[dict]:
    """Measure nine quiet users beside a calm and a flooding tenth; nobody is limited."""
    rows = []
    with engine({"default": None}) as server:
        asyncio.run(phase(server, 0))
        for run in range(RUNS):
            calm, flooded = (asyncio.run(ten(server, streams)) for streams in (1, 64))
            both = [
                latencies([answer for each in users.values() for answer in each])
                for users in (calm, flooded)
            ]
            worst = max(
                latencies(flooded[user])["first_token_p50_ms"]
                / latencies(calm[user])["first_token_p50_ms"]
                for user in calm
            )
            rows.append(
                {
                    "run": run,
                    "calm_p95_ms": both[0]["first_token_p95_ms"],
                    "flooded_p95_ms": both[1]["first_token_p95_ms"],
                    "pooled_p95_ratio": both[1]["first_token_p95_ms"]
                    / both[0]["first_token_p95_ms"],
                    "worst_p50_ratio": worst,
                }
            )
            print(rows[-1], flush=True)
    return rows


def shares() -> list[dict]:
    """Measure what users with weights get when all have more to do than there is room for."""

    async def run(server: Server) -> list[dict]:
        async with Client(server.url) as client:
            answers = {user: [Answer(user) for _ in range(12)] for user in WEIGHTS}
            tasks = [
                asyncio.create_task(
                    client.complete(user, prompt(4), 4000, answer=answer, ignore_eos=True)
                )
                for user, each in answers.items()
                for answer in each
            ]
            await asyncio.sleep(3)
            before = {user: sum(len(a.token_ids) for a in each) for user, each in answers.items()}
            await asyncio.sleep(SHARE_SECONDS)
            tokens = {
                user: sum(len(a.token_ids) for a in each) - before[user]
                for user, each in answers.items()
            }
            await cancelled(tasks)
        total = sum(tokens.values())
        return [
            {
                "user": user,
                "weight": weight,
                "tokens": tokens[user],
                "part": tokens[user] / total,
                "of_its_share": tokens[user] / total / (weight / sum(WEIGHTS.values())),
            }
            for user, weight in WEIGHTS.items()
        ]

    with engine({"default": None, "weights": WEIGHTS}) as server:
        return asyncio.run(run(server))


def throughput_with_weights() -> list[dict]:
    """Measure stock and ours with users of different weights that all have more to do."""
    with tempfile.TemporaryDirectory() as folder:
        limits = limits_in(Path(folder), {"default": None, "weights": WEIGHTS})
        return [throughput("sync", limits, (*MODEL, *SIZES), backlogged_tokens_per_second)]


def backlogged_tokens_per_second(server: Server) -> float:
    """Measure one run, by vLLM's own count of tokens, while every user has requests that wait.

    Whole answers: to stream them would load the machine with other things.
    """

    async def run() -> float:
        async with Client(server.url) as client:

            async def keep_asking(user: str) -> None:
                options = {"stream": False, "stream_options": None, "ignore_eos": True}
                while True:
                    answer = await client.complete(user, prompt(2), 120, **options)
                    assert answer.status == 200, answer.body

            tasks = [asyncio.create_task(keep_asking(user)) for user in WEIGHTS for _ in range(12)]
            await asyncio.sleep(1)
            tokens, start = generated_tokens(server), time.perf_counter()
            await asyncio.wait(tasks, timeout=RUN_SECONDS, return_when="FIRST_COMPLETED")
            rate = (generated_tokens(server) - tokens) / (time.perf_counter() - start)
            await cancelled(tasks)
        return rate

    return asyncio.run(run())


def generated_tokens(server: Server) -> float:
    """Return vLLM's count of generated tokens."""
    (count,) = re.findall(r"^vllm:generation_tokens_total.* (\S+)$", server.get("/metrics"), re.M)
    return float(count)


def measure() -> dict:
    """Run all measurements."""
    return {
        "long_prompts": beside_long_prompts(),
        "full_cache": beside_full_cache(),
        "ten_users": ten_users(),
        "shares": shares(),
        "throughput": throughput_with_weights(),
    }
