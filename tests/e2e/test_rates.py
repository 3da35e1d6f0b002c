"""A limited user gets its rate: not more, and not less."""

import asyncio
from dataclasses import dataclass

import pytest
from served.client import Client, arrivals_of
from served.rates import steady_ns, tokens_per_second
from served.server import Server

SECONDS = 30


@dataclass(frozen=True)
class Run:
    """When tokens arrived, by user, and when the engine put its steps together."""

    arrivals: dict[str, list[int]]
    steps_ns: list[int]


@pytest.fixture(scope="module")
def run(servers: dict[str, Server]) -> Run:
    """Three users that streamed beside each other."""
    server = servers["roomy"]
    start = server.record.position()
    arrivals = asyncio.run(_stream(server.url))
    steps = server.record.since(start).steps
    return Run(arrivals, [step["at_ns"] for step in steps])


async def _stream(url: str) -> dict[str, list[int]]:
    async with Client(url) as client:

        async def tokens_of(user: str, rate: int, streams: int) -> tuple[str, list[int]]:
            tokens = rate * SECONDS // streams
            answers = await asyncio.gather(
                *(
                    client.complete(user, f"{user} {index}", tokens, ignore_eos=True)
                    for index in range(streams)
                )
            )
            return user, arrivals_of(answers)

        return dict(
            await asyncio.gather(
                tokens_of("one-stream", 20, 1),
                tokens_of("four-streams", 20, 4),
                tokens_of("two-streams", 100, 2),
            )
        )


@pytest.mark.parametrize(
    ("user", "rate"), [("one-stream", 20), ("four-streams", 20), ("two-streams", 100)]
)
def test_rate_is_the_limit(run: Run, user: str, rate: int) -> None:
    """From token number burst x rate + 2 on, tokens arrive at the limit within 0.5 %."""
    steady = steady_ns(run.arrivals[user], run.steps_ns, rate)
    assert len(steady) >= (400 if rate == 100 else 200)
    measured = tokens_per_second(steady)
    print(f"{measured:.3f} tokens/s at a limit of {rate}, over {len(steady)} tokens")
    assert measured == pytest.approx(rate, rel=0.005)
