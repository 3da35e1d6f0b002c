"""A limited user gets its rate: not more, and not less."""

import asyncio
from dataclasses import dataclass

import pytest
from served.client import Client, arrivals_of
from served.rates import BURST_NS, delivered_rate_of, rate_of
from served.record import Excerpt
from served.server import Server

SECONDS = 30


@dataclass(frozen=True)
class Run:
    """When tokens arrived, by user, and what the engine did."""

    arrivals: dict[str, list[int]]
    excerpt: Excerpt


@pytest.fixture(scope="module")
def run(servers: dict[str, Server]) -> Run:
    """Three users that streamed beside each other."""
    server = servers["roomy"]
    start = server.record.position()
    arrivals = asyncio.run(_stream(server.url))
    return Run(arrivals, server.record.settled_since(start))


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


LIMITED = pytest.mark.parametrize(
    # With two streams a user needs five steps for the ten tokens of its burst.
    ("user", "limit", "needed_steps"),
    [("one-stream", 20, 2), ("four-streams", 20, 1), ("two-streams", 100, 5)],
)


@LIMITED
def test_rate_is_the_limit(run: Run, user: str, limit: int, needed_steps: int) -> None:
    """From token number burst x limit + 2 on, tokens leave the engine at it within 0.5 %."""
    emitted_ns = run.excerpt.emission_ns_by_user()[user]
    rate = rate_of(emitted_ns, run.excerpt.steps_ns, limit, needed_steps)
    rate.check(limit, least_tokens=400 if limit == 100 else 200)


@LIMITED
def test_delivered_rate_is_the_limit(run: Run, user: str, limit: int, needed_steps: int) -> None:
    """The same holds for what reaches the client."""
    emitted_ns = run.excerpt.emission_ns_by_user()[user]
    rate = delivered_rate_of(
        run.arrivals[user], emitted_ns, run.excerpt.steps_ns, limit, needed_steps
    )
    rate.check(limit, least_tokens=400 if limit == 100 else 200)


INTERVAL_NS = 50_000_000
STEP_NS = 5_000_000
EVEN_NS = [index * INTERVAL_NS for index in range(200)]


def test_a_rate_is_seen_as_it_is() -> None:
    """The measure itself: what comes one percent too fast is seen as that."""
    faster_ns = [index * INTERVAL_NS * 100 // 101 for index in range(200)]
    for limit, instants_ns in (20, EVEN_NS), (20.2, faster_ns):
        rate = rate_of(instants_ns, instants_ns, 20)
        assert rate.per_second == pytest.approx(limit, rel=1e-6)
        assert (rate.tokens, rate.part) == (197, 1)


def test_a_stall_of_the_machine_changes_no_rate() -> None:
    """What was computed while it stood still does not count, nor the burst that comes behind it."""
    before_ns, after_ns = EVEN_NS[:80], [at + 10 * INTERVAL_NS for at in EVEN_NS[80:]]
    burst_ns = [after_ns[0] + STEP_NS, after_ns[0] + 2 * STEP_NS]
    steps_ns = [*before_ns, after_ns[0], *burst_ns, *after_ns[1:]]
    emitted_ns = [at + STEP_NS for at in steps_ns]
    emitted_ns[79] = after_ns[0] - STEP_NS  # the step in which the machine stood still
    rate = rate_of(emitted_ns, steps_ns, 20)
    assert rate.per_second == pytest.approx(20, rel=1e-6)
    assert rate.tokens == 79 + 122 - 2 * 3
    assert rate.part < 1


def test_an_engine_that_often_stands_still_has_no_rate() -> None:
    """It may be the engine that sleeps, so what is left must not pass for all there was."""
    sleeps_ns = [at + at // (20 * INTERVAL_NS) * 20 * INTERVAL_NS for at in EVEN_NS]
    rate = rate_of(sleeps_ns, sleeps_ns, 20)
    assert rate.per_second == pytest.approx(20, rel=1e-6)
    with pytest.raises(AssertionError):
        rate.check(20, least_tokens=100)


def test_steps_too_slow_for_the_streams_change_no_rate() -> None:
    """While two streams have a step in every 30 ms they cannot have a hundred tokens a second."""
    slow_ns = [index * 30_000_000 for index in range(100)]
    fast_ns = [slow_ns[-1] + 20_000_000 * index for index in range(1, 200)]
    steps_ns = [*slow_ns, *fast_ns]
    emitted_ns = [instant for instant in steps_ns for _ in range(2)]
    rate = rate_of(emitted_ns, steps_ns, 100, needed_steps=5)
    assert rate.per_second == pytest.approx(100, rel=5e-3)
    assert rate.tokens == 2 * (199 - 3) - 11  # the first three still have a slow step in their span
    assert rate_of(emitted_ns, steps_ns, 100).per_second < 90


def test_tokens_held_up_on_their_way_change_no_rate() -> None:
    """What came more than a burst after it had left is left out."""
    held_ns = EVEN_NS[80] + 10 * BURST_NS
    arrivals_ns = [max(at, held_ns) if at >= EVEN_NS[80] else at for at in EVEN_NS]
    rate = delivered_rate_of(arrivals_ns, EVEN_NS, EVEN_NS, 20)
    assert rate.per_second == pytest.approx(20, rel=5e-3)
    assert 150 < rate.tokens < 197
