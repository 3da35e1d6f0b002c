"""More streams than slots, of ten users at ten rates, on an engine that is slow now and then."""

import random

from engine_bed import NS_PER_MS, Bed

RATES = {f"user-{rate}": rate for rate in (0.5, 1, 2, 3, 5, 8, 10, 15, 20, 30)}
STREAMS = 8
STEPS = 1_500


def test_a_crowd_keeps_every_bound(is_async: bool) -> None:
    """Clients that hang up and ask anew, preemption, and steps of any length break no bound."""
    dice = random.Random(10)
    bed = Bed(
        RATES,
        is_async=is_async,
        max_num_seqs=64,
        max_num_active_seqs=16,
        max_num_batched_tokens=2048,
        num_blocks=3000,
        step_ms=10,
    )
    patience: dict[str, int | None] = {}

    def ask(user: str) -> None:
        tokens = dice.randint(1, 30)
        name = bed.add(user, prompt=dice.choice([1, 10, 200]), tokens=tokens)
        patience[name] = dice.randint(1, tokens) if dice.random() < 0.3 else None

    for user in RATES:
        for _ in range(STREAMS):
            ask(user)
    for _ in range(STEPS):
        quiet_ns = bed.scheduler.quiet_until_ns()
        if quiet_ns is not None and quiet_ns > bed.now_ns:
            bed.clock.advance_ns(quiet_ns - bed.now_ns)
        if dice.random() < 0.02:
            bed.executor.step_ns = dice.choice([10, 30, 150, 200]) * NS_PER_MS
        bed.step()
        for name, most in [*patience.items()]:
            has_enough = most is not None and len(bed.answers[name]) >= most
            if name in bed.finished or has_enough:
                if name not in bed.finished:
                    bed.abort(name)
                del patience[name]
                ask(bed.user_of(name))
    bed.check_window_bound()
