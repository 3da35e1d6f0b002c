"""Many paused residents and many known users cost the others nothing."""

import gc

import pytest
from engine_bed import Bed

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
