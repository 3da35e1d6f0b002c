"""Grants, refusals, refunds and forgetting, example by example; `tests/laws` has the laws."""

from collections.abc import Callable, Iterable
from fractions import Fraction

import pytest

from vllm_pacer.limiter import OutputRateLimiter
from vllm_pacer.quota import Quota

MS = 1_000_000
SECOND = 1_000_000_000
RATES = [Fraction(1, 1000), Fraction(1, 10), Fraction(1, 3), Fraction(20), 10**6, 10**9]


def limiter_of(rate: int | str | Fraction | None, burst_ns: int = 100 * MS) -> OutputRateLimiter:
    """Return a limiter that gives every user the same quota."""
    quota = None if rate is None else Quota.per_second(rate, burst_ns)
    return OutputRateLimiter(lambda user: quota)


def takes_at(limiter: OutputRateLimiter, now_ns: int, user: str = "a", tokens: int = 1) -> bool:
    """Try to take tokens in a step of its own, of which nothing will be refunded."""
    step = limiter.begin_step(now_ns)
    granted = limiter.try_take(user, tokens)
    limiter.end_step(step)
    return granted


def grants_at(limiter: OutputRateLimiter, now_ns: int, user: str = "a", most: int = 100) -> int:
    """Take until refused, in a step of its own, and return the number of tokens granted."""
    step = limiter.begin_step(now_ns)
    granted = next((n for n in range(most) if not limiter.try_take(user)), most)
    limiter.end_step(step)
    return granted


# --- grants --------------------------------------------------------------------------------------


def test_the_worked_line() -> None:
    """Limit 10, four streams, 30 ms steps: grants at 0 (two), 120, 210 and 300 ms."""
    limiter = limiter_of(10)
    grants = {ms: grants_at(limiter, ms * MS, most=4) for ms in range(0, 301, 30)}
    assert {ms: n for ms, n in grants.items() if n} == {0: 2, 120: 1, 210: 1, 300: 1}


@pytest.mark.parametrize("rate", RATES)
def test_refused_before_ready_at_and_granted_exactly_at_it(rate: Fraction | int) -> None:
    """A user is refused at every instant before the promised one and granted exactly at it."""
    limiter = limiter_of(rate, burst_ns=0)
    now_ns = 12_345
    for _ in range(5):
        assert takes_at(limiter, now_ns)
        ready_ns = limiter.ready_at_ns("a")
        interval_ns = int(Fraction(SECOND) / rate)
        instants = {now_ns, now_ns + 1, now_ns + interval_ns // 2, ready_ns - 2, ready_ns - 1}
        for instant_ns in sorted(ns for ns in instants if now_ns <= ns < ready_ns):
            assert not takes_at(limiter, instant_ns)
        assert ready_ns >= now_ns + interval_ns
        now_ns = ready_ns


@pytest.mark.parametrize("rate", [Fraction(1, 3), 7, 20, 1000])
@pytest.mark.parametrize("burst_ns", [0, 1, 100 * MS, 3 * SECOND])
def test_ready_at_with_a_burst_and_several_tokens(rate: Fraction | int, burst_ns: int) -> None:
    """`ready_at_ns` for n tokens within the burst is the first instant that grants all n."""
    most = int(burst_ns * Fraction(rate) / SECOND) + 1
    for tokens in {1, 2, most} - {0} - set(range(most + 1, 3)):
        limiter = limiter_of(rate, burst_ns)
        start_ns = 5 * SECOND
        grants_at(limiter, start_ns, most=most)
        ready_ns = limiter.ready_at_ns("a", tokens)
        assert ready_ns > start_ns
        assert not takes_at(limiter, ready_ns - 1, tokens=tokens)
        assert takes_at(limiter, ready_ns, tokens=tokens)


def test_n_at_once_is_one_after_the_other() -> None:
    """Several at once are granted iff as many single ones would be, with the same state."""
    for taken in range(5):
        for tokens in range(1, 6):
            at_once, one_by_one = limiter_of(20), limiter_of(20)
            for limiter in at_once, one_by_one:
                limiter.begin_step(SECOND)
                assert all(limiter.try_take("a") for _ in range(min(taken, 3)))
            single_grants = sum(one_by_one.try_take("a") for _ in range(tokens))
            assert at_once.try_take("a", tokens) == (single_grants == tokens)
            if single_grants == tokens:
                assert at_once.ready_at_ns("a") == one_by_one.ready_at_ns("a")


def test_n_at_once_are_tested_at_the_last_token() -> None:
    """The first of three tokens fits and the last does not: refused, or the bound would break."""
    limiter = limiter_of(10)
    assert not takes_at(limiter, 0, tokens=3)
    assert takes_at(limiter, 0, tokens=2)


def test_a_refusal_changes_nothing() -> None:
    """A thousand refusals later the user's next token comes at the same instant."""
    limiter = limiter_of(10)
    limiter.begin_step(0)
    assert grants_at(limiter, 0) == 2
    account, ready_ns = limiter.account("a"), limiter.ready_at_ns("a")
    tat = account.tat
    for ns in range(1000):
        assert not takes_at(limiter, ns)
        assert not takes_at(limiter, ns, tokens=7)
    assert account.tat == tat
    assert takes_at(limiter, ready_ns)


@pytest.mark.parametrize("idle_ns", [200 * MS, SECOND, 3600 * SECOND, 10**18])
def test_no_extra_token_after_an_idle_pause(idle_ns: int) -> None:
    """However long a user was away, it gets burst * N + 1 tokens at once and no more."""
    limiter = limiter_of(10)
    assert grants_at(limiter, 0) == 2
    assert grants_at(limiter, idle_ns) == 2
    assert limiter.ready_at_ns("a") == idle_ns + 100 * MS


@pytest.mark.parametrize(
    ("rate", "burst_ns", "at_once"),
    [(10, 0, 1), (10, 100 * MS, 2), (10, 99 * MS, 1), (1000, SECOND, 1001)],
)
def test_the_burst(rate: int, burst_ns: int, at_once: int) -> None:
    """A user that was idle gets the whole part of burst * N, and one, at once."""
    assert grants_at(limiter_of(rate, burst_ns), 0, most=2000) == at_once


def test_users_do_not_share() -> None:
    """What one user takes is not missing for another."""
    limiter = limiter_of(10)
    assert grants_at(limiter, 0, "a") == 2
    assert grants_at(limiter, 0, "b") == 2
    assert not takes_at(limiter, 0, "a")


def test_an_unlimited_user_is_always_granted() -> None:
    """A user without a quota is granted any number at any time, and is ready at once."""
    limiter = limiter_of(None)
    step = limiter.begin_step(7)
    assert all(limiter.try_take("a") for _ in range(10_000))
    assert limiter.try_take("a", 10**9)
    assert limiter.ready_at_ns("a", 10**9) <= 7
    assert limiter.available(limiter.account("a")) > 10**12
    limiter.refund("a", step, 8, 10**9)
    assert not limiter.account("a").limited


def test_available_counts_what_can_be_taken() -> None:
    """`available` is the number of single tokens that the step still grants."""
    limiter = limiter_of(30)
    limiter.begin_step(SECOND)
    account = limiter.account("a")
    for left in (4, 3, 2, 1):
        assert limiter.available(account) == left
        assert limiter.take(account)
    assert limiter.available(account) == 0
    assert not limiter.take(account)


@pytest.mark.parametrize("rate", [Fraction(1, 3), Fraction(7, 10), 3, 7, Fraction(1_000_003, 7)])
def test_a_million_intervals_do_not_drift(rate: Fraction | int) -> None:
    """The token after a million intervals comes at their exact sum, rounded up once."""
    limiter = limiter_of(rate, burst_ns=0)
    now_ns, tokens = 0, 1_000_000
    limiter.begin_step(0)
    account = limiter.account("a")
    assert limiter.take(account)
    # A user that is always served in time never waits for the rounding of an earlier instant.
    generous = limiter_of(rate, burst_ns=tokens * 10 * SECOND)
    generous.begin_step(0)
    assert generous.try_take("a", tokens)
    exact_ns = tokens * Fraction(SECOND) / rate
    assert generous.account("a").tat == exact_ns * Fraction(rate).numerator
    for _ in range(1000):
        now_ns = limiter.ready_at_ns("a")
        assert takes_at(limiter, now_ns)
    assert 1000 * Fraction(SECOND) / rate <= now_ns < 1000 * Fraction(SECOND) / rate + 1000


def test_a_million_single_takes_are_exact() -> None:
    """A million takes of a third of a nanosecond's precision add up to the exact sum."""
    limiter = limiter_of(3, burst_ns=400_000 * SECOND)
    limiter.begin_step(0)
    account = limiter.account("a")
    take = limiter.take
    assert all(take(account) for _ in range(1_000_000))
    assert account.tat == 1_000_000 * SECOND
    assert limiter.available(account) == 200_001


@pytest.mark.parametrize("rate", ["0.1", 10**6])
def test_slow_and_fast_users_after_years_of_uptime(rate: str | int) -> None:
    """At 0.1 and 1,000,000 tokens a second the state is exact after a century, and stays small."""
    limiter = limiter_of(rate)
    century_ns = 100 * 365 * 24 * 3600 * SECOND
    at_once = int(Fraction(rate) / 10) + 1
    assert grants_at(limiter, century_ns, most=at_once + 1) == at_once
    assert limiter.ready_at_ns("a") == century_ns + at_once * SECOND / Fraction(rate) - 100 * MS
    assert limiter.account("a").tat.bit_length() < 100


# --- refunds -------------------------------------------------------------------------------------


def test_a_late_refund_creates_no_credit() -> None:
    """N = 10: takes at 0 and 150 ms, refund of the first at 151 ms, and then one token, not two.

    One step back would be too generous: 3 tokens in 1 ms where 2 are allowed.
    """
    limiter = limiter_of(10)
    first = limiter.begin_step(0)
    assert limiter.try_take("a")
    limiter.begin_step(150 * MS)
    assert limiter.try_take("a")
    limiter.refund("a", first, 151 * MS)
    assert grants_at(limiter, 151 * MS) == 1


def test_a_refund_at_once_is_a_full_refund() -> None:
    """Taken and given back in the same step, a token was never taken."""
    limiter = limiter_of(10)
    step = limiter.begin_step(SECOND)
    account = limiter.account("a")
    assert limiter.try_take("a")
    before = account.tat
    assert limiter.try_take("a")
    limiter.refund("a", step, SECOND)
    assert account.tat == before
    limiter.refund("a", step, SECOND)
    assert limiter.ready_at_ns("a") == SECOND - 100 * MS
    assert grants_at(limiter, SECOND) == 2


def test_a_refund_gives_back_what_has_not_drained() -> None:
    """30 ms after its charge a token of 100 ms is worth 70 ms."""
    limiter = limiter_of(10)
    step = limiter.begin_step(0)
    assert limiter.try_take("a", 2)
    limiter.refund("a", step, 30 * MS)
    # A level of 170 ms is worth one whole token.
    assert limiter.account("a").tat == 100 * MS * limiter.account("a")._scale
    limiter.refund("a", step, 30 * MS)
    assert limiter.account("a").tat == 30 * MS * limiter.account("a")._scale
    assert limiter.ready_at_ns("a") == -70 * MS


@pytest.mark.parametrize("late_ns", [100 * MS, 101 * MS, SECOND])
def test_a_drained_charge_is_worth_nothing(late_ns: int) -> None:
    """Once a charge has drained its refund changes nothing, even if others were made since."""
    refunded, untouched = limiter_of(10), limiter_of(10)
    for limiter in refunded, untouched:
        step = limiter.begin_step(0)
        assert limiter.try_take("a")
        limiter.begin_step(late_ns)
        assert limiter.try_take("a")
        if limiter is refunded:
            limiter.refund("a", step, late_ns)
    assert refunded.account("a").tat == untouched.account("a").tat
    assert refunded.ready_at_ns("a") == untouched.ready_at_ns("a")


def test_refunds_in_any_order_of_steps() -> None:
    """Three steps in flight, refunded newest or oldest first, leave the same level."""
    tats = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        limiter = limiter_of(10)
        steps = []
        for ms in (0, 50, 100):
            steps.append(limiter.begin_step(ms * MS))
            assert limiter.try_take("a")
        for index in order:
            limiter.refund("a", steps[index], 110 * MS)
        tats.append(limiter.account("a").tat)
    assert len(set(tats)) == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["oldest first", "newest first"])
def test_a_second_refund_knows_of_the_first(order: tuple[int, int]) -> None:
    """Takes at 0, 50 and 140 ms: without the first two the level is the third's 100 ms, no less.

    At 140 ms the level was down to 60 ms, which the first refund uses up for the second as well.
    """
    limiter = limiter_of(10)
    steps = []
    for ms in (0, 50, 140):
        steps.append(limiter.begin_step(ms * MS))
        assert limiter.try_take("a")
    for index in order:
        limiter.refund("a", steps[index], 140 * MS)
    assert limiter.account("a").tat == 240 * MS * limiter.account("a")._scale


def test_a_refund_is_no_savings_account() -> None:
    """After a refund of everything a user is like one that never came, not better."""
    limiter = limiter_of(10)
    step = limiter.begin_step(0)
    assert limiter.try_take("a", 2)
    limiter.refund("a", step, 1, tokens=2)
    limiter.end_step(step)
    assert grants_at(limiter, 500 * MS) == 2


def test_taking_what_was_granted_names_those_that_run_low() -> None:
    """Named are the accounts that cannot give each of their live requests one more token now."""
    limiter = limiter_of(10)
    limiter.begin_step(0)
    accounts = [limiter.account(user) for user in "abc"]
    for account, requests in zip(accounts, (1, 2, 1), strict=True):
        account.requests = requests
    tokens_of = dict(zip(accounts, (1, 1, 2), strict=True))
    assert limiter.take_granted(tokens_of) == accounts[1:]
    assert [limiter.available(account) for account in accounts] == [1, 1, 0]


def test_taking_what_was_not_granted_is_an_error() -> None:
    """Whoever takes more than was available is told, not served."""
    limiter = limiter_of(10)
    limiter.begin_step(0)
    account = limiter.account("a")
    account.requests = 3
    with pytest.raises(ValueError, match="'a' does not have the 3 tokens taken"):
        limiter.take_granted({account: 3})


def test_a_refund_of_an_ended_step_is_an_error() -> None:
    """Nothing can be refunded of a step that has ended."""
    limiter = limiter_of(10)
    step = limiter.begin_step(0)
    assert limiter.try_take("a")
    limiter.end_step(step)
    tat = limiter.account("a").tat
    with pytest.raises(ValueError, match="has ended"):
        limiter.refund("a", step, 0)
    assert limiter.account("a").tat == tat


def test_a_refund_without_a_charge_gives_nothing() -> None:
    """A user that took nothing in a step gets nothing back of it, whatever it took later."""
    limiter = limiter_of(10)
    step = limiter.begin_step(0)
    limiter.begin_step(1)
    assert limiter.try_take("a")
    tat = limiter.account("a").tat
    limiter.refund("a", step, 1)
    assert limiter.account("a").tat == tat


def test_the_refund_of_a_rate_with_a_huge_numerator() -> None:
    """The refund rule holds for every fraction, also where scaled times exceed 256 bits."""
    rate = Fraction(10**90 + 1, 10**89)
    limiter = limiter_of(rate)
    step = limiter.begin_step(SECOND)
    assert limiter.try_take("a")
    limiter.refund("a", step, SECOND)
    assert limiter.account("a").tat == SECOND * rate.numerator


# --- forgetting ----------------------------------------------------------------------------------


def busy_users(limiter: OutputRateLimiter, users: Iterable[int], now_ns: int, tokens: int) -> None:
    """Let users take in one step."""
    step = limiter.begin_step(now_ns)
    for user in users:
        limiter.try_take(str(user), tokens)
    limiter.end_step(step)


def test_cleanup_never_changes_a_decision() -> None:
    """A limiter that forgets idle users decides like one that never forgets anybody."""
    cleaned, kept = limiter_of(10), limiter_of(10)
    kept.cleanup_idle_users = lambda checks=0: 0  # type: ignore[method-assign]
    forgotten = 0
    for number in range(3000):
        now_ns = number * 7 * MS
        decisions = []
        for limiter in cleaned, kept:
            limiter.begin_step(now_ns)
            user = str(number * number % 61)
            decisions.append([limiter.try_take(user) for _ in range(3)])
            limiter.end_step(number + 1)
        assert decisions[0] == decisions[1]
        forgotten += cleaned.cleanup_idle_users()
    assert forgotten > 1000
    assert len(kept) > len(cleaned)


def test_ready_at_of_a_forgotten_user_lies_in_the_past() -> None:
    """A forgotten user is ready, as it was before it was forgotten."""
    limiter = limiter_of(10)
    assert takes_at(limiter, SECOND)
    limiter.begin_step(3 * SECOND)
    assert limiter.cleanup_idle_users() == 1
    assert limiter.ready_at_ns("a") <= 3 * SECOND


@pytest.mark.parametrize("users", [100, 100_000])
def test_cleanup_is_constant_work(users: int) -> None:
    """One call looks at as many users as told, however many there are, and comes round to all."""
    limiter = limiter_of(10)
    busy_users(limiter, range(users), 0, tokens=2)
    known = len(limiter)
    limiter.begin_step(SECOND)
    assert limiter.cleanup_idle_users(checks=7) == 7
    assert limiter.cleanup_idle_users() == 2
    assert len(limiter) == known - 9
    for _ in range(-(-known // 2)):
        limiter.cleanup_idle_users()
    assert len(limiter) == 0
    assert limiter.cleanup_idle_users() == 0


@pytest.mark.parametrize("new_per_step", [1, 256])
def test_a_million_one_shot_users_leave_few_accounts(new_per_step: int) -> None:
    """One-shot users are forgotten as fast as they come, also when 256 come per step."""
    limiter = limiter_of(100)  # a token's trace is gone after 10 ms, one step
    largest = user = 0
    total = 1_000_000 if new_per_step == 256 else 100_000
    for number in range(total // new_per_step):
        step = limiter.begin_step(number * 10 * MS)
        limiter.cleanup_idle_users()
        for user in range(user, user + new_per_step):  # noqa: B020
            assert limiter.try_take(str(user))
        limiter.end_step(step)
        user += 1
        largest = max(largest, len(limiter))
    assert user == total - total % new_per_step
    assert largest <= 4 * new_per_step + 16


def forget_all(limiter: OutputRateLimiter) -> int:
    """Look at every user, and return how many were forgotten."""
    return sum(limiter.cleanup_idle_users(checks=len(limiter)) for _ in range(2))


def test_a_user_with_an_open_charge_is_not_forgotten() -> None:
    """While a refund may come a user is remembered, however long ago its charge has drained."""
    limiter = limiter_of(10)
    step = limiter.begin_step(0)
    assert limiter.try_take("a")
    limiter.begin_step(3600 * SECOND)
    assert forget_all(limiter) == 0
    limiter.refund("a", step, 3600 * SECOND)
    limiter.end_step(step)
    assert forget_all(limiter) == 1


def test_a_user_with_live_requests_is_not_forgotten() -> None:
    """Whoever holds an account for a live request holds the one that counts."""
    limiter = limiter_of(10)
    account = limiter.account("a")
    account.requests = 1
    assert takes_at(limiter, 0)
    limiter.begin_step(3600 * SECOND)
    assert forget_all(limiter) == 0
    assert limiter.account("a") is account
    account.requests = 0
    assert forget_all(limiter) == 1


@pytest.mark.parametrize(
    "use", [lambda limiter: takes_at(limiter, 0), lambda limiter: limiter.ready_at_ns("a")]
)
def test_a_user_in_debt_is_not_forgotten(use: Callable[[OutputRateLimiter], object]) -> None:
    """A user is forgotten at the instant its last token has drained, and not before."""
    limiter = limiter_of(10)
    assert grants_at(limiter, 0) == 2
    use(limiter)
    limiter.begin_step(200 * MS - 1)
    limiter.end_step(limiter.begin_step(200 * MS - 1))
    assert forget_all(limiter) == 0
    limiter.begin_step(200 * MS)
    assert forget_all(limiter) == 1


def test_unlimited_users_are_forgotten_too() -> None:
    """A user without a quota leaves no trace once its step has ended."""
    limiter = limiter_of(None)
    assert grants_at(limiter, SECOND) == 100
    limiter.begin_step(SECOND + 1)
    assert forget_all(limiter) == 1


def test_steps_may_end_in_any_order() -> None:
    """A charge stays refundable while its own step is open, whichever others have ended."""
    limiter = limiter_of(10)
    steps = []
    for ms in (0, 10, 20):
        steps.append(limiter.begin_step(ms * MS))
        limiter.try_take("a")
    limiter.end_step(steps[1])
    with pytest.raises(ValueError, match="has ended"):
        limiter.refund("a", steps[1], 20 * MS)
    limiter.refund("a", steps[0], 20 * MS)
    limiter.end_step(steps[0])
    limiter.end_step(steps[2])
    assert takes_at(limiter, 30 * MS)
    assert limiter.account("a").earlier == ()
