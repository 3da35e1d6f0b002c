"""The quota as the real schedulers keep it."""

from engine_bed import Bed


def test_worked_line(is_async: bool) -> None:
    """Limit 10, four streams, 30 ms steps: tokens leave at 0 (two), 120, 210 and 300 ms."""
    bed = Bed({"a": 10}, is_async=is_async)
    bed.add("steps-go-on", tokens=100)
    for _ in range(4):
        bed.add("a", tokens=50)
    bed.run(until_ms=310)
    assert bed.dispatched_ms("a")[:5] == [0, 0, 120, 210, 300]
