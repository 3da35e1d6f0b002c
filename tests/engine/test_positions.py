"""Who gets the active positions when more requests could run than there are positions."""

import pytest
from engine_bed import Bed


@pytest.mark.parametrize(
    ("rate", "step_ms", "users", "active", "burst_seconds"),
    [
        (20, 50, 4, 2, 0),  # everybody is ready again in the step after its token
        (5, 120, 6, 2, 0.1),
        (10, 30, 8, 2, 0.1),
        (9, 30, 12, 4, 0.1),
        (4, 160, 4, 2, 0.1),
    ],
)
def test_users_of_one_limit_get_one_share(
    rate: int, step_ms: int, users: int, active: int, burst_seconds: float
) -> None:
    """With too few positions for all, users of the same limit stay within a few tokens."""
    names = [f"user-{number}" for number in range(users)]
    bed = Bed(
        dict.fromkeys(names, rate),
        step_ms=step_ms,
        max_num_active_seqs=active,
        max_num_seqs=32,
        burst_seconds=burst_seconds,
    )
    for name in names:
        bed.add(name, tokens=2000)
    bed.run(until_ms=60_000)
    delivered = [bed.books.delivered[name] for name in names]
    possible = min(users * rate * 60, active * 60_000 // step_ms)
    assert min(delivered) > 0.9 * possible / users
    assert max(delivered) - min(delivered) <= 8


def test_newcomer_is_admitted_beside_ready_residents() -> None:
    """Residents that are ready again leave positions to a request that waits, if slots are free."""
    bed = Bed(
        {f"resident-{number}": 10 for number in range(8)},
        step_ms=50,
        max_num_active_seqs=2,
        max_num_seqs=32,
    )
    for number in range(8):
        bed.add(f"resident-{number}", tokens=2000)
    bed.run(until_ms=5_000)
    newcomer = bed.add("newcomer", tokens=5)
    bed.run(until_ms=10_000)
    assert len(bed.answers[newcomer]) == 5


def test_long_prompt_of_a_user_with_quota_displaces_paused_residents() -> None:
    """Paused residents that hold the KV cache give way to a prompt of several chunks, too."""
    bed = Bed({"slow": 0.1}, num_blocks=40, block_size=16, max_num_batched_tokens=128, step_ms=30)
    for _ in range(4):
        bed.add("slow", prompt=128, tokens=30)
    bed.run(until_ms=2_000)
    quiet = bed.add("quiet", prompt=400, tokens=5)
    bed.run(until_ms=2_500)
    assert len(bed.answers[quiet]) == 5
