"""The only reader of time."""

import time
from typing import Protocol

NS_PER_SECOND = 1_000_000_000


class Clock(Protocol):
    """A source of monotonic time in integer nanoseconds."""

    def now_ns(self) -> int:
        """Return the time now; it never goes backwards."""
        ...


class MonotonicClock:
    """The machine's monotonic clock: changes of the wall clock do not reach it."""

    now_ns = staticmethod(time.monotonic_ns)


class FakeClock:
    """A clock that moves only when told to, for tests and simulations.

    Args:
        now_ns: The time it shows first, in nanoseconds.
    """

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Return the time it was last set to."""
        return self._now_ns

    def advance_ns(self, duration_ns: int) -> None:
        """Move forward.

        Raises:
            ValueError: `duration_ns` is negative.
        """
        if duration_ns < 0:
            raise ValueError(f"A clock cannot go back: got {duration_ns} ns, need 0 or more.")
        self._now_ns += duration_ns
