"""The rate at which a user got tokens, once its burst was used up."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import linear_regression

BURST_SECONDS = 0.1


def steady_ns(instants_ns: Sequence[int], steps_ns: Sequence[int], limit: float) -> list[int]:
    """Return a user's tokens from number burst x limit + 2 on, in the longest time without a stall.

    Quota that is earned beyond the burst while a step runs expires. A machine that stands still
    for longer costs its users that quota, which is not what is measured; and it fills the burst
    up again, so that the count starts anew.

    Args:
        instants_ns: When the user's tokens came.
        steps_ns: When the engine put its steps together, by the same clock.
        limit: Tokens per second.
    """
    begin, end = _longest_stretch(
        [step for step in steps_ns if instants_ns[0] <= step <= instants_ns[-1]]
    )
    in_stretch = [instant for instant in instants_ns if begin <= instant <= end]
    return in_stretch[int(BURST_SECONDS * limit) + 1 :]


def _longest_stretch(steps_ns: Sequence[int]) -> tuple[int, int]:
    burst_ns = int(BURST_SECONDS * 1e9)
    stretches, start = [], steps_ns[0]
    for before, after in pairwise(steps_ns):
        if after - before > burst_ns:
            stretches.append((start, before))
            start = after
    stretches.append((start, steps_ns[-1]))
    return max(stretches, key=lambda stretch: stretch[1] - stretch[0])


def tokens_per_second(instants_ns: Sequence[int]) -> float:
    """Return the rate by least squares: one late token does not count for more than others."""
    return linear_regression(instants_ns, range(len(instants_ns))).slope * 1e9
