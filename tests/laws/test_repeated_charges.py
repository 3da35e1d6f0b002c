"""Rule 7 of the limiter: charges that repeat are booked late, and nobody can tell."""

from collections import deque
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.quota import Quota

MS = 1_000_000
RATES = {"a": Fraction(10), "b": Fraction(100, 3), "c": Fraction(1000)}
# What is charged is granted by the scheduler, so here there is always more than enough.
QUOTAS = {user: Quota(rate, 10**15) for user, rate in RATES.items()}
CHARGES = ({"a": 1}, {"a": 1, "b": 1, "c": 1}, {"b": 2, "c": 3}, {"u": 1}, {})
MOST_REQUESTS = 10**9  # of which a user cannot give each a token, whatever its burst
STEPS_IN_FLIGHT = 3

users = st.sampled_from("abcu")  # u has no limit


def at_hand(limiter: OutputRateLimiter, user: str) -> Account:
    """Return an account without asking for it."""
    return limiter._accounts[user]


def charge(limiter: OutputRateLimiter, tokens_of: Mapping[Account, int], now_ns: int) -> list[str]:
    """Charge a step, by repetition if that is possible; return the users that run low."""
    if limiter.repeat(tokens_of, now_ns) is not None:
        return []
    limiter.begin_step(now_ns)
    return [account.user for account in limiter.take_granted(tokens_of)]


class RepeatedCharges(RuleBasedStateMachine):
    """Two limiters are asked the same; one repeats charges where it can."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.copied = (OutputRateLimiter(QUOTAS.get) for _ in range(2))
        self.mappings: list[Mapping[Account, int]] = []
        self._both(self._open_accounts)
        self.now_ns = 0
        self.open_steps: deque[int] = deque()

    def _open_accounts(self, limiter: OutputRateLimiter) -> None:
        for user in "abcu":
            limiter.account(user).requests = 1
        if limiter is self.shared:
            self.mappings = [self._of(limiter, charges) for charges in CHARGES]

    def _of(self, limiter: OutputRateLimiter, charges: dict[str, int]) -> dict[Account, int]:
        return {limiter.account(user): tokens for user, tokens in charges.items()}

    def _both(self, ask: Callable[[OutputRateLimiter], Any]) -> None:
        answer = ask(self.shared)
        assert ask(self.copied) == answer

    @rule(
        gap_ns=st.sampled_from([100 * MS, 300 * MS, 30 * MS, 100 * MS - 1, MS, 0]),
        index=st.integers(0, len(CHARGES) - 1),
        times=st.integers(1, 4),
    )
    def charge(self, gap_ns: int, index: int, times: int) -> None:
        """Steps charge the same, once or a few times."""
        for _ in range(times):
            self.now_ns += gap_ns
            low = charge(self.shared, self.mappings[index], self.now_ns)
            self.open_steps.append(self.shared._step)
            assert self.copied.begin_step(self.now_ns) == self.shared._step
            copy = self._of(self.copied, CHARGES[index])
            assert [account.user for account in self.copied.take_granted(copy)] == low
            if len(self.open_steps) > STEPS_IN_FLIGHT:
                step = self.open_steps.popleft()
                self._both(lambda limiter, step=step: limiter.end_step(step))

    @rule(
        user=users,
        tokens=st.integers(1, 3),
        late_ns=st.sampled_from([0, MS, 50 * MS]),
        steps_ago=st.integers(0, STEPS_IN_FLIGHT - 1),
    )
    def refund(self, user: str, tokens: int, late_ns: int, steps_ago: int) -> None:
        """Something of a step in flight is given back."""
        if steps_ago < len(self.open_steps):
            step, now_ns = self.open_steps[-1 - steps_ago], self.now_ns + late_ns
            self._both(
                lambda limiter: limiter.give_back(at_hand(limiter, user), step, now_ns, tokens)
            )

    @rule(user=users, tokens=st.integers(1, 3))
    def take(self, user: str, tokens: int) -> None:
        """Somebody takes tokens outside of the charges."""
        self._both(lambda limiter: limiter.take(at_hand(limiter, user), tokens))

    @rule(
        user=users,
        ask=st.sampled_from(
            [
                OutputRateLimiter.available,
                OutputRateLimiter.can_take,
                OutputRateLimiter.account_ready_at_ns,
            ]
        ),
    )
    def ask(self, user: str, ask: Callable[[OutputRateLimiter, Account], Any]) -> None:
        """Somebody asks what is left, or when the next token comes."""
        self._both(lambda limiter: ask(limiter, at_hand(limiter, user)))

    @rule(user=users, requests=st.sampled_from([0, 1, MOST_REQUESTS]))
    def change_requests(self, user: str, requests: int) -> None:
        """A request of a user comes or ends."""

        def change(limiter: OutputRateLimiter) -> None:
            limiter.account(user).requests = requests

        self._both(change)

    @rule(user=users)
    def end_request(self, user: str) -> None:
        """A request of a user ends, for which nobody asks the limiter."""
        for limiter in (self.shared, self.copied):
            at_hand(limiter, user).requests = 0

    @rule(least_ns=st.sampled_from([0, 10**16]))
    def set_least_burst(self, least_ns: int) -> None:
        """Steps become slow, or fast again: what is left is another number."""
        self._both(lambda limiter: limiter.set_least_burst(least_ns))

    @rule()
    def forget_absent_users(self) -> None:
        """Users that are not there, and have drained, are forgotten; here they come back."""
        self._both(lambda limiter: limiter.cleanup_idle_users(4))
        for limiter in (self.shared, self.copied):
            for user in "abcu":
                account = limiter.account(user)
                account.requests = max(account.requests, 1)
        self.mappings = [self._of(self.shared, charges) for charges in CHARGES]

    @invariant()
    def what_is_not_booked_is_known(self) -> None:
        """Now and then all is booked: then the accounts are the same in every part."""
        if self.shared._step % 3 == 0:
            self.shared._book_repeated()
            assert self._state(self.shared) == self._state(self.copied)

    def teardown(self) -> None:
        """In the end, too."""
        self.shared._book_repeated()
        assert self._state(self.shared) == self._state(self.copied)

    def _state(self, limiter: OutputRateLimiter) -> dict[str, tuple[Any, ...]]:
        return {
            user: (account.tat, account.step, account.lowest, account.earlier)
            for user, account in limiter._accounts.items()
        }


TestRepeatedCharges = RepeatedCharges.TestCase


def _give_back(limiter: OutputRateLimiter) -> object:
    return limiter.give_back(at_hand(limiter, "a"), 2, 150 * MS)


def _take(limiter: OutputRateLimiter) -> object:
    return limiter.take(at_hand(limiter, "a"))


def _ask_in_a_later_step(limiter: OutputRateLimiter) -> object:
    limiter.begin_step(150 * MS)
    return limiter.available(at_hand(limiter, "a"))


def _ask_when(limiter: OutputRateLimiter) -> object:
    return limiter.account_ready_at_ns(at_hand(limiter, "a"))


def _forget_who_left(limiter: OutputRateLimiter) -> object:
    at_hand(limiter, "a").requests = 0
    for step in 1, 2:
        limiter.end_step(step)
    return limiter.cleanup_idle_users(4)


def _open_again(limiter: OutputRateLimiter) -> object:
    account = limiter.account("a")
    account.requests = MOST_REQUESTS
    limiter.begin_step(10_000 * MS)
    return None


@pytest.mark.parametrize(
    "ask",
    [_give_back, _take, _ask_in_a_later_step, _ask_when, _forget_who_left, _open_again],
    ids=lambda ask: ask.__name__.strip("_"),
)
def test_whoever_asks_sees_what_was_charged(ask: Callable[[OutputRateLimiter], object]) -> None:
    """A step whose charges repeat is booked when anything depends on it, and not before."""
    answers = []
    for is_shared in (True, False):
        limiter = OutputRateLimiter(QUOTAS.get)
        tokens_of = {limiter.account("a"): 1}
        at_hand(limiter, "a").requests = 1
        for now_ns in (0, 100 * MS):
            charge(limiter, tokens_of if is_shared else {**tokens_of}, now_ns)
        assert (at_hand(limiter, "a").step == 1) == is_shared
        answer = ask(limiter)
        named = [each.user for each in limiter.take_granted({**tokens_of})]
        account = at_hand(limiter, "a")
        answers.append((answer, named, account.tat, account.step, account.earlier))
    assert answers[0] == answers[1]


def test_a_user_with_more_requests_is_not_charged_as_before() -> None:
    """Its account was asked for when the request came; from then on it is looked at again."""
    limiter = OutputRateLimiter(QUOTAS.get)
    tokens_of = {limiter.account("a"): 1}
    for number in range(3):
        assert charge(limiter, tokens_of, number * 100 * MS) == []
    limiter.account("a").requests = MOST_REQUESTS
    assert charge(limiter, tokens_of, 300 * MS) == ["a"]


def test_a_user_that_runs_low_is_named_in_every_step() -> None:
    """As long as it may run out of quota in the next step, it is looked at in each."""
    limiter = OutputRateLimiter(QUOTAS.get)
    tokens_of = {limiter.account("a"): 1}
    limiter.account("a").requests = MOST_REQUESTS
    for number in range(3):
        assert charge(limiter, tokens_of, number * 100 * MS) == ["a"]


def test_a_step_too_early_to_repeat_is_not_opened() -> None:
    """As long as the last charges have not drained, the caller has to look: no step is open."""
    limiter = OutputRateLimiter(QUOTAS.get)
    tokens_of = {limiter.account("a"): 1}
    assert charge(limiter, tokens_of, 0) == []
    assert limiter.repeat(tokens_of, 100 * MS - 1) is None
    assert limiter.repeat({**tokens_of}, 100 * MS) is None
    assert [*limiter._open_steps] == [1]
    assert limiter.repeat(tokens_of, 100 * MS) == 2
    assert [*limiter._open_steps] == [1, 2]
