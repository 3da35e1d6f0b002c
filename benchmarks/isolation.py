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
from serving import VERSION, launched

RUNS = 3
TURNS = 2
"""How often many streams are measured in a run, each time between two measurements of one."""
QUIET_REQUESTS = 150
COMPARED_REQUESTS = 300
"""In a phase beside streams: of fewer, the 99th percentile would be the second or third."""
QUIET_TOKENS = 12
NEIGHBOUR_TOKENS = 4000
NEIGHBOUR_RATE = 40
STREAMS = (64, 512, 2000)
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


def measure() -> dict:
    """Run all measurements."""
    return {"streams": beside_streams()}
