"""What a neighbour with many streams does to a user with one, on the served engine.

A quiet user sends short requests one after another: alone, beside a neighbour with one stream, and
beside the same neighbour with many. The neighbour is limited, so its streams together do the same
work in all phases, and what differs is only how many of them there are. For the same reason its
prompts are one token long, except where prompts are what is measured.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from served.client import Answer, Client, cancelled
from served.record import Excerpt
from served.server import API_SERVER, Server, wait_until_ready

from paths import SMOLLM2
from serving import VERSION, launched, throughput

RUNS = 3
TURNS = 2
"""How often many streams are measured in a run, each time between two measurements of one."""
QUIET_REQUESTS = 150
COMPARED_REQUESTS = 300
"""In a phase beside streams: of fewer, the percentile that is compared would be two or three."""
QUIET_TOKENS = 12
NEIGHBOUR_TOKENS = 4000
NEIGHBOUR_RATE = 40
STREAMS = (64, 512, 2000)
SHARE_SECONDS = 30
WEIGHTS = {"one": 1, "two": 2, "four": 4}
SMALLER = {"num_hidden_layers": 3, "vocab_size": 8192}
"""Of SmolLM2's thirty layers and 49,152 words. Two cores need 75 ms for a step of the whole, so a
stream could not have forty tokens a second, whoever is beside it. What the weights say is all the
same here: they are random."""

LIMITS = {"default": None, "users": {"neighbour": NEIGHBOUR_RATE}}

_chance = random.Random(0)


SIZES = ("--max-model-len", "4608", "--max-num-seqs", "32", "--max-num-active-seqs", "8")
MODEL = ("--model", str(SMOLLM2), "--hf-overrides", json.dumps(SMALLER))


@contextmanager
def engine(config: dict[str, Any], *args: str) -> Iterator[Server]:
    """Start the engine, with thirty-two residents and eight active."""
    with tempfile.TemporaryDirectory() as folder:
        command = (*MODEL, *SIZES, *limits_in(Path(folder), config), *args)
        with launched(Path(folder), VERSION, "sync", API_SERVER, *command) as server:
            wait_until_ready(server)
            yield server


def limits_in(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """Write a file of limits and return the flag that gives it."""
    file = folder / "limits.json"
    file.write_text(json.dumps(config))
    return "--user-output-rate-config", str(file)


def prompt(tokens: int) -> list[int]:
    """Return a prompt that shares no prefix with another."""
    return [_chance.randrange(1000, 8000) for _ in range(tokens)]


async def quiet(
    client: Client, requests: int = QUIET_REQUESTS, user: str = "quiet"
) -> list[Answer]:
    """Send short requests one after another."""
    return [
        await client.complete(user, prompt(4), QUIET_TOKENS, ignore_eos=True)
        for _ in range(requests)
    ]


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def latencies(answers: list[Answer]) -> dict[str, float]:
    """Return first token and gap, in milliseconds."""
    first = [(answer.arrivals_ns[0] - answer.sent_ns) / 1e6 for answer in answers]
    gaps = [
        (later - earlier) / 1e6
        for answer in answers
        for earlier, later in pairwise(answer.arrivals_ns)
    ]
    return {
        "first_token_p50_ms": median(first),
        "first_token_p95_ms": percentile(first, 95),
        "first_token_p99_ms": percentile(first, 99),
        "gap_p50_ms": median(gaps),
        "gap_p99_ms": percentile(gaps, 99),
    }


@asynccontextmanager
async def neighbour(
    client: Client, streams: int, prompt_tokens: int, tokens: int | None = None
) -> AsyncIterator[tuple[list[Answer], list["asyncio.Task[Answer]"]]]:
    """Open the neighbour's streams and wait until the server has them all."""
    tokens = tokens or NEIGHBOUR_TOKENS // max(streams, 1)
    answers = [Answer("neighbour") for _ in range(streams)]
    tasks = [
        asyncio.create_task(
            client.complete(
                "neighbour", prompt(prompt_tokens), tokens, answer=answer, ignore_eos=True
            )
        )
        for answer in answers
    ]
    try:
        while answers and not (
            all(answer.status for answer in answers)
            and any(answer.arrivals_ns for answer in answers)
        ):
            for task in tasks:
                if task.done():
                    task.result()  # it may have failed
            await asyncio.sleep(0.2)
        yield answers, tasks
    finally:
        await cancelled(tasks)


@dataclass(frozen=True)
class Phase:
    """The quiet user's answers, what the engine did meanwhile, and the row of a table."""

    answers: list[Answer]
    excerpt: Excerpt
    row: dict[str, Any]


async def phase(
    server: Server,
    streams: int,
    prompt_tokens: int = 1,
    tokens: int | None = None,
    requests: int = QUIET_REQUESTS,
    to_the_end: bool = False,
) -> Phase:
    """Measure the quiet user beside a neighbour."""
    async with (
        Client(server.url) as client,
        neighbour(client, streams, prompt_tokens, tokens) as (answers, tasks),
    ):
        await quiet(client, 5)
        position = server.record.position()
        measured = await quiet(client, requests)
        excerpt = server.record.since(position)
        begin_ns, end_ns = measured[0].sent_ns, measured[-1].arrivals_ns[-1]
        arrived = sum(begin_ns < each <= end_ns for a in answers for each in a.arrivals_ns)
        row = {
            "streams": streams,
            **latencies(measured),
            "most_steps_waited": max(steps_waited(excerpt, "quiet"), default=0),
            "errors": sum(answer.status != 200 for answer in [*answers, *measured]),
        }
        if streams:
            row["neighbour_tokens_per_second"] = arrived * 1e9 / (end_ns - begin_ns)
        if to_the_end:
            await asyncio.gather(*tasks)
            row["finished"] = sum(answer.finish_reason == "length" for answer in answers)
    return Phase(measured, excerpt, row)


def steps_waited(excerpt: Excerpt, user: str) -> list[int]:
    """Return how many steps went by without each request of a user, from its arrival on."""
    waiting: dict[str, int] = {}
    waited: list[int] = []
    for line in excerpt.lines:
        if line.get("user") == user:
            waiting[line["request"]] = 0
        sampled = line.get("sampled", ())
        waited += [waiting.pop(request) for request in sampled if request in waiting]
        if "step" in line:
            waiting = {request: steps + 1 for request, steps in waiting.items()}
    return waited


def beside_streams() -> list[dict]:
    """Measure the quiet user alone, and beside one stream and many streams in turns.

    The machine gets faster and slower from minute to minute, so what is compared lies close
    together. What such a comparison is worth is seen where nothing differs: the times beside one
    stream are compared with each other, too.
    """
    rows = []
    compared = partial(phase, requests=COMPARED_REQUESTS)
    with engine(LIMITS) as server:
        asyncio.run(phase(server, 0))  # warm
        for run in range(RUNS):
            rows.append({"run": run, **asyncio.run(compared(server, 0)).row})
            for streams in STREAMS:
                ones, manys = [asyncio.run(compared(server, 1))], []
                for turn in range(TURNS):
                    to_the_end = run == turn == 0
                    manys.append(asyncio.run(compared(server, streams, to_the_end=to_the_end)))
                    ones.append(asyncio.run(compared(server, 1)))
                one, many = pooled(ones), pooled(manys)
                again = ratios(ones[-1].row, ones[0].row)
                rows.append({"run": run, **one, **again})
                rows.append({"run": run, **many, **ratios(many, one)})
                print(*rows[-2:], sep="\n", flush=True)
    return rows


def pooled(phases: list[Phase]) -> dict[str, Any]:
    """Return the row of all phases together; a count or a rate is the worst of them."""
    rows = [phase.row for phase in phases]
    return {
        **phases[0].row,
        **latencies([answer for phase in phases for answer in phase.answers]),
        "most_steps_waited": max(row["most_steps_waited"] for row in rows),
        "errors": sum(row["errors"] for row in rows),
        "neighbour_tokens_per_second": max(
            (row["neighbour_tokens_per_second"] for row in rows),
            key=lambda rate: abs(rate - NEIGHBOUR_RATE),
        ),
    }


def ratios(row: dict[str, float], one: dict[str, float]) -> dict[str, float]:
    """Return the percentiles as multiples of those beside one stream."""
    return {
        "first_token_p99_ratio": row["first_token_p99_ms"] / one["first_token_p99_ms"],
        "gap_p99_ratio": row["gap_p99_ms"] / one["gap_p99_ms"],
    }


def beside_long_prompts() -> list[dict]:
    """Measure the quiet user beside prompts of four chunks each, and the steps with a chunk."""
    rows = []
    with engine(LIMITS, "--max-num-batched-tokens", "256") as server:
        asyncio.run(phase(server, 0))
        for run in range(RUNS):
            measured = asyncio.run(phase(server, 64, 800))
            chunk = chunk_steps_ms(measured.excerpt)
            row = {"run": run, **measured.row, "chunk_p50_ms": median(chunk)}
            row["chunk_p99_ms"] = percentile(chunk, 99)
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


def beside_full_cache() -> list[dict]:
    """Measure the quiet user while paused residents hold all KV blocks and slots are free."""
    rows = []
    with engine(LIMITS, "--num-gpu-blocks-override", "41", "--block-size", "128") as server:
        asyncio.run(phase(server, 0))
        for run in range(RUNS):
            one = asyncio.run(phase(server, 1)).row
            # Long answers, so that what fills the cache are residents and not their prompts.
            row = asyncio.run(phase(server, 16, 300, tokens=300)).row
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
    """Measure stock and ours with three users of different weights, all backlogged."""
    config = {"default": None, "weights": {f"user-{n}": 2**n for n in range(3)}}
    with tempfile.TemporaryDirectory() as folder:
        limits = limits_in(Path(folder), config)
        return [throughput("sync", limits, (*MODEL, *SIZES), users=3, process_pairs=1)]


def measure() -> dict:
    """Run all measurements."""
    return {
        "streams": beside_streams(),
        "long_prompts": beside_long_prompts(),
        "full_cache": beside_full_cache(),
        "ten_users": ten_users(),
        "shares": shares(),
        "throughput": throughput_with_weights(),
    }
