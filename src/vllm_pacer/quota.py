"""Rate and burst of one user, and who has which.

Rates are exact fractions, never floats: a limiter that adds one interval per token must not
drift, and 0.1 tokens per second has no exact binary form.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

ANONYMOUS_USER = "__anonymous__"
"""Requests that name no user share this one's quota."""

DEFAULT_BURST_NS = 100_000_000


@dataclass(frozen=True, slots=True)
class Quota:
    """What one user may generate: tokens ≤ (W + burst) × rate + 1 in every window of W seconds.

    >>> Quota.per_second(20)
    Quota(tokens_per_second=Fraction(20, 1), burst_ns=100000000)
    >>> Quota.per_second("0.5").interval_ns
    Fraction(2000000000, 1)
    """

    tokens_per_second: Fraction
    burst_ns: int = DEFAULT_BURST_NS

    @classmethod
    def per_second(cls, rate: int | str | Fraction, burst_ns: int = DEFAULT_BURST_NS) -> "Quota":
        """Build a quota from a rate written as an integer, a decimal string or a fraction.

        A float would bring its binary fraction along: write "0.1", not 0.1.

        Raises:
            TypeError: The rate is a float.
            ValueError: The rate is not above zero, or the burst is negative.
        """
        if isinstance(rate, float):
            raise TypeError(f"A rate must be exact: got {rate!r}, write {str(rate)!r} in quotes.")
        return cls(Fraction(rate), burst_ns)

    def __post_init__(self) -> None:
        if self.tokens_per_second <= 0:
            raise ValueError(
                f"A rate must be above zero: got {self.tokens_per_second} tokens per second."
            )
        if self.burst_ns < 0:
            raise ValueError(f"A burst must be zero or more: got {self.burst_ns} ns.")

    @property
    def interval_ns(self) -> Fraction:
        """The time between two tokens at the full rate, in nanoseconds."""
        return Fraction(1_000_000_000) / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class Quotas:
    """The quota of every user: its own where it is named, the default otherwise.

    `None` in either place means no limit.
    """

    default: Quota | None
    by_user: Mapping[str, Quota | None]

    def of(self, user: str) -> Quota | None:
        """Return the user's quota, or `None` if it has no limit."""
        return self.by_user.get(user, self.default)
