"""The limiter's laws over random histories, against the definition of GCRA."""

from dataclasses import dataclass
from fractions import Fraction

from hypothesis import example, given
from hypothesis import strategies as st
from oracle import SECOND_NS, NaiveLimiter, excess_tokens, level_ns

from vllm_pacer.limiter import OutputRateLimiter
from vllm_pacer.quota import Quota

MS = 1_000_000
STEPS_IN_FLIGHT = 3

rates = st.one_of(
    st.sampled_from([Fraction(1, 10), Fraction(1, 3), Fraction(10), Fraction(20), Fraction(10**6)]),
    st.fractions(Fraction(1, 1000), 10**9, max_denominator=1000),
)
bursts_in_tokens = st.fractions(0, 4, max_denominator=8)
gaps_in_tokens = st.one_of(
    st.sampled_from([Fraction(0), Fraction(1, 100), Fraction(1), Fraction(1000)]),
    st.fractions(0, 3, max_denominator=16),
)


@dataclass(frozen=True)
class Ask:
    """A step: the time since the last, what is asked, and what comes back how many steps later."""

    gap: Fraction  # in tokens' time
    tokens: tuple[int, ...]
    unused: tuple[int, ...]
    late_by: int


asks = st.builds(
    Ask,
    gap=gaps_in_tokens,
    tokens=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    unused=st.lists(st.integers(0, 3), min_size=3, max_size=3).map(tuple),
    late_by=st.integers(0, STEPS_IN_FLIGHT),
)


def in_ns(tokens: Fraction, rate: Fraction) -> int:
    """Return the time that so many tokens take, in whole nanoseconds."""
    return int(tokens * SECOND_NS / rate)


class History:
    """One user's history on the real limiter, and its surviving charges for the oracle."""

    def __init__(self, rate: Fraction, burst_ns: int) -> None:
        self.rate, self.burst_ns = rate, burst_ns
        quota = Quota(rate, burst_ns)
        self.limiter = OutputRateLimiter(lambda user: quota)
        self.now_ns = 0
        self.charges: list[list[int]] = []  # [instant, tokens not refunded]
        self._due: list[tuple[int, int, int, list[int]]] = []  # (when due, step, unused, charge)
        self._ends: list[tuple[int, int]] = []
        self._count = 0

    def step(self, ask: Ask) -> None:
        """Take the step, then process the results that are due."""
        self._count += 1
        self.now_ns += in_ns(ask.gap, self.rate)
        step = self.limiter.begin_step(self.now_ns)
        for tokens, unused in zip(ask.tokens, ask.unused, strict=False):
            if self.limiter.try_take("a", tokens):
                charge = [self.now_ns, tokens]
                self.charges.append(charge)
                due = self._count + ask.late_by
                self._due.append((due, step, min(unused, tokens), charge))
        self._ends.append((self._count + ask.late_by, step))
        self.check()
        self._process_results()

    def _process_results(self) -> None:
        for due, step, unused, charge in self._due:
            if due == self._count and unused:
                self.limiter.refund("a", step, self.now_ns, unused)
                charge[1] -= unused
                self.check()
        self._due = [each for each in self._due if each[0] > self._count]
        for due, step in self._ends:
            if due == self._count:
                self.limiter.end_step(step)
        self._ends = [each for each in self._ends if each[0] > self._count]

    def check(self) -> None:
        """Hold the limiter against the history of the charges that survived."""
        charges = [(instant_ns, tokens) for instant_ns, tokens in self.charges if tokens]
        assert excess_tokens(charges, self.rate, self.burst_ns, self.now_ns) == 0
        account = self.limiter.account("a")
        limiter_level_ns = max(Fraction(account.tat, self.rate.numerator) - self.now_ns, 0)
        assert limiter_level_ns == level_ns(charges, self.rate, self.now_ns)


@given(rates, bursts_in_tokens, st.lists(asks, max_size=30))
@example(  # the late refund that one step back makes too generous: 3 tokens in 1 ms
    Fraction(10),
    Fraction(1),
    [
        Ask(Fraction(0), (1,), (1,), 2),
        Ask(Fraction(3, 2), (1,), (0,), 0),
        Ask(Fraction(1, 100), (), (), 0),
        Ask(Fraction(0), (1, 1), (0, 0), 0),
    ],
)
@example(  # two refunds of what had drained together: the newer first, then the older first
    Fraction(10),
    Fraction(1),
    [
        Ask(Fraction(0), (1,), (1,), 3),
        Ask(Fraction(1, 2), (1,), (1,), 1),
        Ask(Fraction(9, 10), (1,), (0,), 0),
        Ask(Fraction(0), (), (), 0),
    ],
)
@example(
    Fraction(10),
    Fraction(1),
    [
        Ask(Fraction(0), (1,), (1,), 2),
        Ask(Fraction(1, 2), (1,), (1,), 2),
        Ask(Fraction(9, 10), (1,), (0,), 0),
        Ask(Fraction(0), (), (), 0),
    ],
)
def test_window_bound_and_exact_refunds(
    rate: Fraction, burst: Fraction, history: list[Ask]
) -> None:
    """Whatever is refunded up to 3 steps late, the limiter stands as if it was never charged.

    So no window of any length exceeds (W + burst) * N + 1, and no refund gives too little either.
    """
    limited = History(rate, in_ns(burst, rate))
    for ask in history:
        limited.step(ask)


@given(rates, st.lists(st.fractions(0, 1, max_denominator=50), min_size=1, max_size=60))
@example(Fraction(10), [Fraction(0)] + [Fraction(3, 10)] * 20)
def test_the_rate_is_attained(rate: Fraction, gaps: list[Fraction]) -> None:
    """A user that always wants more gets floor((W + burst) * N) + 1 tokens, however steps fall.

    No step is longer than the burst here; a longer one loses what was earned beyond it.
    """
    burst_ns = in_ns(Fraction(3, 2), rate) + 1
    quota = Quota(rate, burst_ns)
    limiter = OutputRateLimiter(lambda user: quota)
    now_ns = tokens = 0
    for gap in gaps:
        now_ns += int(gap * burst_ns) if tokens else 0
        step = limiter.begin_step(now_ns)
        while limiter.try_take("a"):
            tokens += 1
        limiter.end_step(step)
        assert tokens == int((now_ns + burst_ns) * rate / SECOND_NS) + 1


@given(
    rates,
    bursts_in_tokens,
    st.lists(
        st.tuples(gaps_in_tokens, st.sampled_from("abcdefgh"), st.integers(1, 4)), max_size=60
    ),
)
def test_decisions_are_those_of_the_definition(
    rate: Fraction, burst: Fraction, takes: list[tuple[Fraction, str, int]]
) -> None:
    """Many users, forgotten and met again, get the decisions that the definition gives."""
    quota = Quota(rate, in_ns(burst, rate))
    limiter, naive = OutputRateLimiter(lambda user: quota), NaiveLimiter(rate, quota.burst_ns)
    now_ns = 0
    for gap, user, tokens in takes:
        now_ns += in_ns(gap, rate)
        step = limiter.begin_step(now_ns)
        limiter.cleanup_idle_users(checks=3)
        available = limiter.available(limiter.account(user))
        granted = limiter.try_take(user, tokens)
        assert granted == naive.try_take(user, tokens, now_ns) == (available >= tokens)
        limiter.end_step(step)


@given(rates, bursts_in_tokens, st.lists(gaps_in_tokens, min_size=1, max_size=20), st.data())
def test_ready_at_is_the_first_instant_that_grants(
    rate: Fraction, burst: Fraction, gaps: list[Fraction], data: st.DataObject
) -> None:
    """Refused at a random instant before the one that is promised, granted exactly at it."""
    quota = Quota(rate, in_ns(burst, rate))
    limiter = OutputRateLimiter(lambda user: quota)
    most = int(quota.burst_ns * rate / SECOND_NS) + 1
    now_ns = 0
    for gap in gaps:
        now_ns += in_ns(gap, rate)
        limiter.begin_step(now_ns)
        tokens = data.draw(st.integers(1, most))
        ready_ns = limiter.ready_at_ns("a", tokens)
        assert limiter.try_take("a", tokens) == (ready_ns <= now_ns)
        if ready_ns > now_ns:
            now_ns = data.draw(st.integers(now_ns, ready_ns - 1))
            limiter.begin_step(now_ns)
            assert not limiter.try_take("a", tokens)
            limiter.begin_step(ready_ns - 1)
            assert not limiter.try_take("a", tokens)
            now_ns = ready_ns
            limiter.begin_step(now_ns)
            assert limiter.try_take("a", tokens)
