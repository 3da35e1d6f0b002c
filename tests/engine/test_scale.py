"""Many paused residents and many known users cost the others nothing."""

import gc
from typing import Any

import pytest
from engine_bed import Bed

from vllm_pacer.clock import NS_PER_SECOND
from vllm_pacer.limiter import OutputRateLimiter


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_step_holds_only_those_that_run(is_async: bool, policy: str) -> None:
    """Of 1,000 residents 990 are paused: a step computes the other ten and looks at no more.

    The paused ones are of the better class: under the priority policy, too, they starve nobody.
    """
    bed = Bed(
        {"a": 0.001},
        is_async=is_async,
        policy=policy,
        max_num_seqs=1000,
        max_num_active_seqs=500,
        num_blocks=4000,
    )
    for _ in range(990):
        bed.add("a", prompt=3, tokens=2, priority=0)
    bed.run(until_ms=500)
    visible = {bed.add("b", prompt=3, tokens=300, priority=5) for _ in range(10)}
    bed.run(until_ms=1000)
    assert len(bed.residents()) == 1000
    looked_at: list[str] = []
    reserve = bed.scheduler._reserve_prefill_lookahead

    def noted(request, *args):
        looked_at.append(request.request_id)
        return reserve(request, *args)

    bed.scheduler._reserve_prefill_lookahead = noted
    output = bed.scheduler.schedule()
    assert output.num_scheduled_tokens.keys() == visible
    assert {*looked_at} == visible
    assert len(bed.scheduler.running) == 1000


def test_users_that_are_parked_are_not_all_looked_at() -> None:
    """Who else claims a slot is asked until there is none left, not of all who soon have quota."""
    slots, users = 16, [f"user-{number}" for number in range(200)]
    rates = {"flood": 40, **dict.fromkeys(users, 0.8)}
    bed = Bed(rates, max_num_seqs=slots, max_num_active_seqs=8)
    for _ in range(4):
        bed.add("flood", prompt=4, tokens=300)
    for _ in range(2):
        for user in users:
            bed.add(user, prompt=1, tokens=1)
    bed.run(until_ms=900)
    for _ in range(64):
        bed.add("flood", prompt=4, tokens=300)
    scheduler = bed.scheduler
    claims, blocks = scheduler._claims_of_waiting_users, scheduler._holdings.blocks
    soon, looks = [], [0]

    def noted_claims(free_slots: int) -> Any:
        soon.append(len([*scheduler.waiting.parked(bed.now_ns + NS_PER_SECOND)]))
        return claims(free_slots)

    def noted_blocks(tokens: int) -> int:
        looks[-1] += 1
        return blocks(tokens)

    scheduler._claims_of_waiting_users = noted_claims
    scheduler._holdings.blocks = noted_blocks
    while bed.now_ms < 1_100:
        looks.append(0)
        bed.step()
    assert min(soon) > 150
    assert max(looks) < 2 * slots


def test_absent_users_are_not_looked_at(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million known users who are not present: a step looks at two accounts, as with ten."""
    looks = 0
    is_idle = OutputRateLimiter._is_idle

    def counted(limiter, account):
        nonlocal looks
        looks += 1
        return is_idle(limiter, account)

    monkeypatch.setattr(OutputRateLimiter, "_is_idle", counted)
    bed = Bed(default_rate=0.001)
    bed.add("b", tokens=2)
    limiter = bed.scheduler._limiter
    counts = []
    gc.disable()  # or it would walk through the million again and again while they are made
    request.addfinalizer(gc.enable)
    for known in (10, 1_000_000):
        step = limiter.begin_step(bed.now_ns)
        for each in range(len(limiter), known):
            limiter.try_take(f"user-{each}")
        limiter.end_step(step)
        looks = 0
        bed.step()
        counts.append((len(limiter), looks))
    assert counts == [(10, 2), (1_000_000, 2)]
