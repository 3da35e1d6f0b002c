"""GCRA as its definition has it: fractions, one token at a time, and all history kept."""

from collections.abc import Iterable
from fractions import Fraction

SECOND_NS = 1_000_000_000


def level_ns(charges: Iterable[tuple[int, int]], rate: Fraction, now_ns: int) -> Fraction:
    """Return TAT - now of a user that took (instant, tokens) and nothing else; 0 at least."""
    tat_ns = Fraction(0)
    for instant_ns, tokens in charges:
        tat_ns = max(tat_ns, Fraction(instant_ns)) + tokens * SECOND_NS / rate
    return max(tat_ns - now_ns, Fraction(0))


def excess_tokens(
    charges: list[tuple[int, int]], rate: Fraction, burst_ns: int, until_ns: int
) -> Fraction:
    """Return by how much the worst window that ends at `until_ns` is over its bound; 0 if none.

    Windows that begin at a charge are the worst ones.
    """
    worst = Fraction(0)
    tokens_since = 0
    for instant_ns, tokens in reversed(charges):
        tokens_since += tokens
        bound = (until_ns - instant_ns + burst_ns) * rate / SECOND_NS + 1
        worst = max(worst, tokens_since - bound)
    return worst


class NaiveLimiter:
    """Decides from the definition; knows no refunds and forgets nobody."""

    def __init__(self, rate: Fraction, burst_ns: int) -> None:
        self._rate = rate
        self._burst_ns = burst_ns
        self._tat_ns: dict[str, Fraction] = {}

    def try_take(self, user: str, tokens: int, now_ns: int) -> bool:
        """Take tokens one after the other, and take none back unless one is refused."""
        tat_ns = self._tat_ns.get(user, Fraction(0))
        for _ in range(tokens):
            if tat_ns > now_ns + self._burst_ns:
                return False
            tat_ns = max(tat_ns, Fraction(now_ns)) + SECOND_NS / self._rate
        self._tat_ns[user] = tat_ns
        return True
