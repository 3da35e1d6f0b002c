"""In no window of time does a user get more than its quota allows."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
from served.client import Answer, Client, arrivals_of, cancelled
from served.record import Excerpt
from served.server import ACTIVE_LIMIT, Server

RATES = (0.5, 1, 2, 3, 5, 8, 10, 15, 20, 30)
STREAMS_PER_USER = 8
RUN_SECONDS = 60
RAMP_SECONDS = 5
BURST_NS = 100_000_000
COUNTERS = ("vllm_pacer:charged_tokens_total", "vllm_pacer:refunded_tokens_total")


@dataclass(frozen=True)
class Run:
    """What clients and engine saw of it."""

    answers: dict[str, list[Answer]]
    excerpt: Excerpt
    metrics_before: dict[str, float]
    metrics_after: dict[str, float]


@pytest.fixture(scope="module")
def run(servers: dict[str, Server]) -> Run:
    """Ten users with eight streams each for a minute; clients hang up at random."""
    server = servers["roomy"]
    before = server.metrics()
    start = server.record.position()
    answers = asyncio.run(_crowd(server.url))
    return Run(answers, server.record.settled_since(start), before, server.metrics())


async def _crowd(url: str) -> dict[str, list[Answer]]:
    answers: dict[str, list[Answer]] = defaultdict(list)
    async with Client(url) as client:

        async def keep_asking(user: str, seed: int) -> None:
            dice = random.Random(seed)
            # Eighty requests at once would keep the API server busy while tokens wait in it.
            await asyncio.sleep(dice.random() * RAMP_SECONDS)
            while True:
                answer = Answer(user)
                answers[user].append(answer)
                max_tokens = dice.randint(1, 30)
                await client.complete(
                    user,
                    [dice.randint(200, 4000) for _ in range(dice.choice([1, 10, 200]))],
                    max_tokens,
                    stop_after=dice.randint(1, max_tokens) if dice.random() < 0.3 else None,
                    answer=answer,
                    ignore_eos=True,
                )

        tasks = [
            asyncio.create_task(keep_asking(f"window-{rate}", seed=index * 100 + stream))
            for index, rate in enumerate(RATES)
            for stream in range(STREAMS_PER_USER)
        ]
        done, _ = await asyncio.wait(tasks, timeout=RUN_SECONDS, return_when="FIRST_EXCEPTION")
        await cancelled(tasks)
        assert not done
    return answers


@pytest.mark.parametrize("rate", RATES)
def test_dispatched_tokens_in_every_window(run: Run, rate: float) -> None:
    """On dispatch stamps no window of W seconds holds more than (W + burst) x N + 1 tokens."""
    instants_ns = run.excerpt.dispatch_ns_by_user()[f"window-{rate}"]
    assert len(instants_ns) >= rate * RUN_SECONDS / 2
    _check(instants_ns, rate, BURST_NS)


@pytest.mark.parametrize("rate", RATES)
def test_emitted_tokens_in_every_window(run: Run, rate: float) -> None:
    """As they leave no window holds more than (W + burst + longest step) x N + 1 tokens."""
    instants_ns = run.excerpt.emission_ns_by_user()[f"window-{rate}"]
    assert len(instants_ns) >= rate * RUN_SECONDS / 2
    _check(instants_ns, rate, BURST_NS + run.excerpt.longest_step_ns())


@pytest.mark.parametrize("rate", RATES)
def test_delivered_tokens_in_every_window(run: Run, rate: float) -> None:
    """On client stamps the same holds, a step ending when its token has arrived."""
    instants_ns = arrivals_of(run.answers[f"window-{rate}"])
    assert len(instants_ns) >= rate * (RUN_SECONDS - RAMP_SECONDS) / 2
    answers = [answer for each in run.answers.values() for answer in each]
    longest_ns = run.excerpt.longest_delivery_ns(answers)
    _check(instants_ns, rate, BURST_NS + longest_ns)


def test_no_step_computes_more_than_the_active_limit(run: Run, servers: dict[str, Server]) -> None:
    """In all that the server has done the limit of active requests is reached and never passed."""
    steps = servers["roomy"].record.since().steps
    assert len(steps) > len(run.excerpt.steps)
    assert max(step["computed"] for step in steps) == ACTIVE_LIMIT


def test_clients_hung_up_at_random(run: Run) -> None:
    """The run contains hundreds of answers, complete ones and ones that were cut short."""
    answers = [answer for each in run.answers.values() for answer in each]
    complete = [answer for answer in answers if answer.finish_reason == "length"]
    assert len(complete) > 200
    assert len(answers) - len(complete) > 100
    assert all(answer.status in (0, 200) for answer in answers)


def test_metrics_agree_with_the_run(run: Run) -> None:
    """`/metrics` shows what was charged and refunded since the run began, and nobody paused."""
    increase = {name: run.metrics_after[name] - run.metrics_before[name] for name in COUNTERS}
    assert increase == {
        "vllm_pacer:charged_tokens_total": sum(run.excerpt.charged_by_user.values()),
        "vllm_pacer:refunded_tokens_total": sum(run.excerpt.refunded_by_user.values()),
    }
    assert run.metrics_after["vllm_pacer:paused_requests"] == 0


def _check(instants_ns: Sequence[int], rate: float, allowed_ns: int) -> None:
    needed_ns = ns_over_quota(instants_ns, rate)
    print(f"{len(instants_ns)} tokens, at most {needed_ns / 1e6:.2f} of {allowed_ns / 1e6:.2f} ms")
    assert needed_ns <= allowed_ns


def ns_over_quota(instants_ns: Sequence[int], rate: float) -> Fraction:
    """Return the smallest burst, in nanoseconds, for which every window keeps the bound.

    A window matters only from one token's instant to another's: any other holds the same tokens
    as the shorter one between its outermost tokens. From token i to token j there are
    j - i + 1 tokens in t_j - t_i, so the bound is (j - i)/N - (t_j - t_i) <= burst. With
    x_k = k/N - t_k this is x_j - x_i <= burst for all i <= j, and for each j only the least x_i
    before it needs to be looked at.
    """
    interval_ns = 1_000_000_000 / Fraction(str(rate))
    return max(_rises(index * interval_ns - at_ns for index, at_ns in enumerate(instants_ns)))


def _rises(values: Iterable[Fraction]) -> Iterable[Fraction]:
    lowest = None
    for value in values:
        lowest = value if lowest is None else min(lowest, value)
        yield value - lowest


def test_the_window_check_sees_one_token_too_many() -> None:
    """The check itself: evenly spaced tokens need no burst; one more at once needs one interval."""
    even_ns = [index * 50_000_000 for index in range(100)]
    assert ns_over_quota(even_ns, 20) == 0
    assert ns_over_quota([*even_ns[:50], even_ns[50], *even_ns[50:]], 20) == 50_000_000
    assert ns_over_quota([*even_ns[:50], even_ns[50] - 1, *even_ns[51:]], 20) == 1
