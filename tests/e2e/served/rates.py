"""The rate at which a user got tokens, once its burst was used up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

BURST_NS = 100_000_000


@dataclass(frozen=True)
class Rate:
    """A rate that was measured.

    Attributes:
        per_second: Tokens per second, by least squares: one late token does not count for more
            than others.
        tokens: How many it was measured over.
    """

    per_second: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.per_second:.3f} tokens/s over {self.tokens} tokens"


def rate_of(
    emitted_ns: Sequence[int], steps_ns: Sequence[int], limit: float, needed_steps: int = 1
) -> Rate:
    """Return the rate at which a user's tokens left the engine, from number burst x limit + 2 on.

    Quota that is earned beyond the burst while a step runs expires. A machine that stands still
    for longer costs its users that quota, which is not what is measured; and it fills the burst
    up again, so that the count starts anew. The stretches between have one rate in common.

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
    still: it and what it held up are left out in the same way.

    Args:
        arrivals_ns: When each of the user's tokens reached the client, in order.
        emitted_ns: When each of them left the engine, in order.
        steps_ns: When the engine put its steps together.
        limit: Tokens per second.
        needed_steps: As for `rate_of`.
    """
    stretches = [
        stretch[int(BURST_NS * limit / 1e9) + 1 :]
        for stretch in _without_stalls(arrivals_ns, emitted_ns, steps_ns, needed_steps)
    ]
    # Each stretch about its own centre: what it shares with the others is the slope.
    seconds, counts = [], []
    for stretch in filter(None, stretches):
        middle_ns, middle = fmean(stretch), (len(stretch) - 1) / 2
        seconds += [(instant - middle_ns) / 1e9 for instant in stretch]
        counts += [index - middle for index in range(len(stretch))]
    return Rate(linear_regression(seconds, counts, proportional=True).slope, len(seconds))


def _without_stalls(
    arrivals_ns: Sequence[int],
    emitted_ns: Sequence[int],
    steps_ns: Sequence[int],
    needed_steps: int,
) -> Iterator[list[int]]:
    """Yield the arrivals of each time in which the machine did not stand still."""
    spans = zip(steps_ns, steps_ns[needed_steps:], strict=False)
    resumed_ns = iter(end for begin, end in spans if end - begin > BURST_NS)
    next_ns = next(resumed_ns, None)
    stretch: list[int] = []
    for arrived_ns, left_ns in zip(arrivals_ns, emitted_ns, strict=True):
        is_late = arrived_ns - left_ns > BURST_NS
        is_past_a_stall = False
        while next_ns is not None and left_ns >= next_ns:
            is_past_a_stall, next_ns = True, next(resumed_ns, None)
        if is_late or is_past_a_stall:
            yield stretch
            stretch = []
        if not is_late:
            stretch.append(arrived_ns)
    yield stretch
