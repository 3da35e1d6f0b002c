"""Clocks only go forward."""

import time

import pytest

from vllm_pacer.clock import NS_PER_SECOND, FakeClock, MonotonicClock


def test_the_fake_clock_stands_still_until_told() -> None:
    """The fake clock shows the sum of its advances, exactly, and nothing else moves it."""
    clock = FakeClock(now_ns=5)
    assert [clock.now_ns(), clock.now_ns()] == [5, 5]
    clock.advance_ns(10**18)
    clock.advance_ns(0)
    assert clock.now_ns() == 10**18 + 5


def test_the_fake_clock_cannot_go_backwards() -> None:
    """A negative advance is refused and changes nothing."""
    clock = FakeClock(now_ns=5)
    with pytest.raises(ValueError, match="A clock cannot go back: got -1 ns, need 0 or more"):
        clock.advance_ns(-1)
    assert clock.now_ns() == 5


def test_the_wall_clock_does_not_reach_the_limiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock is the monotonic one, whatever the wall clock shows."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    before_ns = time.monotonic_ns()
    now_ns = MonotonicClock().now_ns()
    assert before_ns <= now_ns <= time.monotonic_ns()
    assert isinstance(now_ns, int)
    assert NS_PER_SECOND == 10**9
