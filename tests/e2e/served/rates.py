"""The rate at which a user got tokens, once its burst was used up.

Quota that is earned beyond the burst while a step runs expires. A machine that stands still for
longer costs its users that quota, which is not what is measured; and it fills the burst up again,
so that the count starts anew. The stretches between such stalls have one rate in common. An engine
that sleeps too long looks the same, so no more than a third of the time may be left out.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, linear_regression

import pytest

BURST_NS = 100_000_000
_STALLED = -1


@dataclass(frozen=True)
class Rate:
    """A rate that was measured.

    Attributes:
        per_second: Tokens per second, by least squares: one late token does not count for more
            than others.
        tokens: How many it was measured over.
        part: Of the time from the first token to the last, the part that it was measured over.
    """

    per_second: float
    tokens: int
    part: float

    def check(self, limit: float, least_tokens: int) -> None:
        """Check that it is the limit within 0.5 %, and that enough went into it."""
        print(
            f"{self.per_second:.3f} tokens/s at a limit of {limit}, over {self.tokens} tokens in "
            f"{self.part:.0%} of the time"
        )
        assert self.tokens >= least_tokens
        assert self.part >= 2 / 3
        assert self.per_second == pytest.approx(limit, rel=0.005)


def rate_of(
    emitted_ns: Sequence[int], steps_ns: Sequence[int], limit: float, needed_steps: int = 1
) -> Rate:
    """Return the rate at which a user's tokens left the engine, from number burst x limit + 2 on.

    Args:
        emitted_ns: When each of the user's tokens left the engine, in order.
        steps_ns: When the engine put its steps together, by the same clock.
        limit: Tokens per second.
        needed_steps: How many steps the engine has to make in the time of the burst for the user's
            streams to use its quota up.
    """
    return delivered_rate_of(emitted_ns, emitted_ns, steps_ns, limit, needed_steps)


def delivered_rate_of(
    arrivals_ns: Sequence[int],
    emitted_ns: Sequence[int],
    steps_ns: Sequence[int],
    limit: float,
    needed_steps: int = 1,
) -> Rate:
    """Return the rate at which a user's tokens reached the client, as `rate_of` counts.

    A token that was under way for longer than the burst was held up by a machine that stood
    still: it is left out in the same way.

    Args:
        arrivals_ns: When each of the user's tokens reached the client, in order.
        emitted_ns: When each of them left the engine, in order.
        steps_ns: When the engine put its steps together.
        limit: Tokens per second.
        needed_steps: As for `rate_of`.
    """
    spans = zip(steps_ns, steps_ns[needed_steps:], strict=False)
    stalls = [(begin, end) for begin, end in spans if end - begin > BURST_NS]
    # Each stretch about its own centre: what it shares with the others is the slope.
    seconds: list[float] = []
    counts: list[float] = []
    measured_ns = 0
    for stretch in _between(stalls, arrivals_ns, emitted_ns):
        counted = stretch[int(BURST_NS * limit / 1e9) + 1 :]
        if len(counted) > 1:
            middle_ns, middle = fmean(counted), (len(counted) - 1) / 2
            seconds += [(instant - middle_ns) / 1e9 for instant in counted]
            counts += [index - middle for index in range(len(counted))]
            measured_ns += stretch[-1] - stretch[0]
    slope = linear_regression(seconds, counts, proportional=True).slope
    return Rate(slope, len(seconds), measured_ns / (arrivals_ns[-1] - arrivals_ns[0]))


def _between(
    stalls: Sequence[tuple[int, int]], arrivals_ns: Sequence[int], emitted_ns: Sequence[int]
) -> Iterator[list[int]]:
    """Yield the arrivals of each time between two stalls."""
    begins, ends = [begin for begin, _ in stalls], [end for _, end in stalls]

    def stretch_of(token: tuple[int, int]) -> int:
        arrived_ns, left_ns = token
        begun, passed = bisect_left(begins, left_ns), bisect_right(ends, left_ns)
        return _STALLED if begun > passed or arrived_ns - left_ns > BURST_NS else passed

    tokens = zip(arrivals_ns, emitted_ns, strict=True)
    for stretch, of_stretch in groupby(tokens, stretch_of):
        if stretch != _STALLED:
            yield [arrived_ns for arrived_ns, _ in of_stretch]
