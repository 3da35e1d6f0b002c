"""A limited user gets its rate: not more, and not less."""

import asyncio
from collections.abc import Sequence

import pytest
from served.client import Client, arrivals_of
from served.server import Server

BURST_SECONDS = 0.1
SECONDS = 30


@pytest.fixture(scope="module")
def arrivals(servers: dict[str, Server]) -> dict[str, list[int]]:
    """When the tokens of three users arrived that streamed beside each other."""
    return asyncio.run(_stream(servers["roomy"].url))


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
def test_rate_is_the_limit(arrivals: dict[str, list[int]], user: str, rate: int) -> None:
    """From token number burst x rate + 2 on, tokens arrive at the limit within 0.5 %."""
    steady_ns = arrivals[user][int(BURST_SECONDS * rate) + 1 :]
    assert len(steady_ns) >= (400 if rate == 100 else 200)
    assert _per_second(steady_ns) == pytest.approx(rate, rel=0.005)


def _per_second(instants_ns: Sequence[int]) -> float:
    """The rate over the whole stretch: a step's jitter counts only at its two ends."""
    return (len(instants_ns) - 1) * 1e9 / (instants_ns[-1] - instants_ns[0])
