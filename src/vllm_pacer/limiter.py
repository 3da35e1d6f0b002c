"""The generic cell rate algorithm (GCRA), one integer per user.

The rules, for a user with rate N and its theoretical arrival time TAT:

1. A token is granted iff TAT ≤ now + burst. Then TAT becomes max(TAT, now) + 1/N.
2. n tokens at once are granted iff the last of them would be: TAT + (n − 1)/N ≤ now + burst.
3. A refusal changes nothing.
4. A refund takes back at most the lowest level (TAT − now, never below 0) seen since its charge:
   what has drained in the meantime would have drained unused without the charge too, and giving
   it back would be new credit.
5. A user may be forgotten when its TAT lies in the past: it cannot be told from a new one.
6. The burst is the user's own, or a least one that is set for all if that is longer.
7. A step that repeats the charges of the last one, all of which have drained, is booked when
   somebody asks for one of its accounts: it costs the same for a thousand users as for one.

Hence, in every window of W seconds, tokens taken and not refunded ≤ (W + burst) × N + 1, with the
longest burst that was in force.

Times are held multiplied by the numerator of the user's rate, so that 1/N is an integer too and
nothing is ever rounded. A user without a limit is one whose tokens take no time.

GCRA: ITU-T I.371, annex A. The refund rule is Reich's formula for a queue from which one
arrival is removed afterwards.
"""

from collections import deque
from collections.abc import Callable, Mapping

from vllm_pacer.clock import NS_PER_SECOND
from vllm_pacer.quota import Quota

_NOT_OBSERVED = -1
"""The lowest level since a charge, before one was observed."""

_NO_LIMIT = 1 << 62
"""The tokens available to a user without a limit."""

_CHECKS_PER_STEP = 2
_CHECKS_PER_NEW_USER = 2


class Account:
    """One user's state. Made and changed by `OutputRateLimiter` alone; others hold references."""

    __slots__ = ("_burst", "_burst_tokens", "_increment", "_scale", "earlier", "lowest",
                 "requests", "step", "tat", "user")  # fmt: skip

    def __init__(self, user: str, quota: Quota | None) -> None:
        self.user = user
        self.requests = 0  # live requests that refer to this account
        self.tat = 0
        self.step = -1  # the last step in which the user asked for a token
        self.lowest = _NOT_OBSERVED  # the lowest level seen since that step's charges
        self.earlier: tuple[tuple[int, int], ...] = ()  # the same for earlier steps, oldest first
        self._scale = quota.tokens_per_second.numerator if quota else 1
        self._increment = quota.tokens_per_second.denominator * NS_PER_SECOND if quota else 0
        self._burst = quota.burst_ns * self._scale if quota else 0
        # What can be taken at once when all earlier charges have drained.
        self._burst_tokens = self._burst // self._increment + 1 if quota else _NO_LIMIT

    @property
    def limited(self) -> bool:
        """Whether the user has a quota at all."""
        return self._increment > 0


class OutputRateLimiter:
    """Grants output tokens to users, each at its own rate.

    Everything within a step happens at the step's instant. A step stays open until no refund of
    its charges can come any more; with asynchronous scheduling several are open at once.

    Args:
        quota_of: Gives a user's quota, or `None` for no limit.

    >>> limiter = OutputRateLimiter(lambda user: Quota.per_second(10))
    >>> step = limiter.begin_step(now_ns=0)
    >>> [limiter.try_take("a") for _ in range(3)]
    [True, True, False]
    >>> limiter.ready_at_ns("a")
    100000000
    """

    def __init__(self, quota_of: Callable[[str], Quota | None]) -> None:
        self._quota_of = quota_of
        self._accounts: dict[str, Account] = {}
        self.users = self._accounts.keys()
        """The users remembered, as they are at any time."""
        self._cleanup_queue: deque[Account] = deque()
        self._open_steps: dict[int, None] = {}
        self._step = 0
        self._now_ns = 0
        self.least_burst_ns = 0  # changed by `set_least_burst` alone

        # For rule 7.
        self._repeated: Mapping[Account, int] | None = None  # what may be charged again
        self._repeated_in = 0  # the last step that charged it
        self._repeated_ns = 0  # the instant of that step
        self._is_booked = True  # nothing of it is left to book
        self._drains: Mapping[Account, int] | None = None  # what the next line is about
        self._drain_ns = 0  # how long it takes to drain

    def __len__(self) -> int:
        """Return the number of users remembered."""
        return len(self._accounts)

    def account(self, user: str) -> Account:
        """Return the user's account, opening one if need be."""
        account = self._accounts.get(user)
        if account is not None:
            self._catch_up(account)
        else:
            # More than one look per newcomer, or one-shot users would outrun the cleaning.
            self.cleanup_idle_users(_CHECKS_PER_NEW_USER)
            account = self._accounts[user] = Account(user, self._quota_of(user))
            self._cleanup_queue.append(account)
        return account

    def set_least_burst(self, least_ns: int) -> None:
        """Let all users be at least `least_ns` ahead of their rates from now on."""
        self.least_burst_ns = least_ns

    def begin_step(self, now_ns: int) -> int:
        """Open a step at `now_ns`, which is not before the step that was opened last.

        Returns:
            The step's number, to be given to `refund` and `end_step`.
        """
        self._step += 1
        self._now_ns = now_ns
        self._open_steps[self._step] = None
        return self._step

    def repeat(self, tokens_of: Mapping[Account, int], now_ns: int) -> int | None:
        """Open a step and take the tokens that `take_granted` took in the last one.

        Args:
            tokens_of: What it took, the same object.
            now_ns: The instant of the step.

        Returns:
            The step's number, or `None` if the charges may not repeat: no step was opened then,
            and `begin_step` and `take_granted` are to be called.
        """
        if tokens_of is not self._repeated or now_ns - self._repeated_ns < self._drain_ns:
            return None
        self._step = self._repeated_in = step = self._step + 1
        self._now_ns = self._repeated_ns = now_ns
        self._is_booked = False
        self._open_steps[step] = None
        return step

    def end_step(self, step: int) -> None:
        """Close a step: none of its charges will be refunded any more."""
        del self._open_steps[step]

    def try_take(self, user: str, tokens: int = 1) -> bool:
        """Take `tokens` from the user's quota at the instant of the current step, or none."""
        return self.take(self.account(user), tokens)

    def take(self, account: Account, tokens: int = 1) -> bool:
        """Do what `try_take` does for an account already at hand."""
        self._catch_up(account)
        if account.step != self._step:
            self._enter_step(account)
        tat = account.tat + tokens * account._increment
        if tat - account._increment > self._horizon(account):
            return False
        account.tat = tat
        return True

    def take_granted(
        self, tokens_of: Mapping[Account, int], per_request_tokens: int = 1
    ) -> list[Account]:
        """Take tokens that were seen to be available from several accounts at once.

        Args:
            tokens_of: The tokens by account; it must not be changed afterwards.
            per_request_tokens: What a request may take in a step.

        Returns:
            The accounts that cannot give each of their live requests so many tokens more now.

        Raises:
            ValueError: An account has fewer tokens. They have been taken, and those before.
        """
        step, now_ns, least_burst_ns = self._step, self._now_ns, self.least_burst_ns
        nearly_spent: list[Account] = []
        self._book_repeated()
        has_drained = True
        for account, tokens in tokens_of.items():
            more = account.requests * per_request_tokens
            now = now_ns * account._scale
            if account.tat > now or account.step == step or account.earlier or least_burst_ns:
                left = self._take_granted(account, tokens)
                has_drained = False
            else:  # what that comes to where all charges have drained, as most have
                account.tat = now + tokens * account._increment
                account.step = step
                account.lowest = _NOT_OBSERVED
                left = account._burst_tokens - tokens
            if left < more:
                nearly_spent.append(account)
                if left < 0:
                    raise ValueError(f"{account.user!r} does not have the {tokens} tokens taken.")
        if has_drained and not nearly_spent:
            self._may_repeat(tokens_of)
        return nearly_spent

    def _may_repeat(self, tokens_of: Mapping[Account, int]) -> None:
        if tokens_of is not self._drains:
            self._drains = tokens_of
            self._drain_ns = max(
                (
                    -(-each * account._increment // account._scale)
                    for account, each in tokens_of.items()
                ),
                default=0,
            )
        self._repeated, self._repeated_in, self._repeated_ns = tokens_of, self._step, self._now_ns

    def _catch_up(self, account: Account) -> None:
        """Bring an account to where it is, before anything depends on it."""
        if self._repeated is not None and account in self._repeated:
            self._book_repeated()

    def _book_repeated(self) -> None:
        repeated, self._repeated = self._repeated, None
        if not self._is_booked and repeated is not None:
            self._is_booked = True
            for account, tokens in repeated.items():
                account.tat = self._repeated_ns * account._scale + tokens * account._increment
                account.step = self._repeated_in
                account.lowest = _NOT_OBSERVED

    def _take_granted(self, account: Account, tokens: int) -> int:
        """Take tokens and return how many are left; below 0 if it had fewer."""
        left = self.available(account) - tokens
        account.tat += tokens * account._increment
        return left

    def refund(self, user: str, step: int, now_ns: int, tokens: int = 1) -> None:
        """Give back `tokens` that were taken in `step`, as far as that creates no new credit.

        Raises:
            ValueError: The step has ended.
        """
        self.give_back(self.account(user), step, now_ns, tokens)

    def give_back(self, account: Account, step: int, now_ns: int, tokens: int = 1) -> None:
        """Do what `refund` does for an account already at hand."""
        self._catch_up(account)
        level = max(account.tat - now_ns * account._scale, 0)
        seen = {
            at: _lower(lowest, level)
            for at, lowest in (*account.earlier, (account.step, account.lowest))
        }
        if step not in self._open_steps:
            raise ValueError(f"Step {step} has ended: nothing of {account.user!r} can be refunded.")
        drained = 0  # the lowest level since a charge that is not kept any more
        given = min(tokens * account._increment, seen.get(step, drained))
        account.tat -= given
        # Without the refunded charge every level since then would have been lower by as much.
        left = seen.get(step, drained) - given
        seen = {at: low - given if at >= step else min(low, left) for at, low in seen.items()}
        account.lowest = seen.pop(account.step)
        account.earlier = tuple(seen.items())

    def can_take(self, account: Account, tokens: int = 1) -> bool:
        """Return whether `take` would succeed in the current step."""
        if account.step != self._step:
            self._enter_step(account)
        return account.tat + (tokens - 1) * account._increment <= self._horizon(account)

    def available(self, account: Account) -> int:
        """Return how many tokens the account can still take in the current step."""
        if account.step != self._step:
            self._enter_step(account)
        ahead = self._horizon(account) - account.tat
        if ahead < 0:
            return 0
        return ahead // account._increment + 1 if account.limited else _NO_LIMIT

    def ready_at_ns(self, user: str, tokens: int = 1) -> int:
        """Return the first instant, in whole nanoseconds, at which `try_take` succeeds."""
        return self.account_ready_at_ns(self.account(user), tokens)

    def account_ready_at_ns(self, account: Account, tokens: int = 1) -> int:
        """Do what `ready_at_ns` does for an account already at hand."""
        self._catch_up(account)
        scaled = account.tat + (tokens - 1) * account._increment - self._burst_of(account)
        return -(-scaled // account._scale)

    def cleanup_idle_users(self, checks: int = _CHECKS_PER_STEP) -> int:
        """Look at the next `checks` users in turn and forget those that are idle.

        Called once per step and once per new user: constant work however many users are known.

        Returns:
            The number of users forgotten.
        """
        queue = self._cleanup_queue
        before = len(queue)
        for _ in range(min(checks, before)):
            account = queue.popleft()
            if self._is_idle(account):
                del self._accounts[account.user]
            else:
                queue.append(account)
        return before - len(queue)

    def _is_idle(self, account: Account) -> bool:
        if account.requests:
            return False
        self._catch_up(account)
        is_over = account.step < self._oldest_open_step()
        return is_over and account.tat <= self._now_ns * account._scale

    def _oldest_open_step(self) -> int:
        return next(iter(self._open_steps), self._step + 1)

    def _enter_step(self, account: Account) -> None:
        """Prepare the account for charges at the instant of the current step."""
        self._catch_up(account)
        if account.step == self._step:
            return
        now = self._now_ns * account._scale
        level = account.tat - now
        if level <= 0:
            account.tat = now
            account.earlier = ()  # all charges have drained
        elif account.step >= self._oldest_open_step():
            earlier = account.earlier
            if earlier:
                earlier = self._still_open(earlier, level)
            account.earlier = (*earlier, (account.step, _lower(account.lowest, level)))
        else:
            account.earlier = ()
        account.lowest = _NOT_OBSERVED
        account.step = self._step

    def _horizon(self, account: Account) -> int:
        """Return now + burst, in the account's time."""
        return self._now_ns * account._scale + self._burst_of(account)

    def _burst_of(self, account: Account) -> int:
        return max(account._burst, self.least_burst_ns * account._scale)

    def _still_open(
        self, charges: tuple[tuple[int, int], ...], level: int
    ) -> tuple[tuple[int, int], ...]:
        oldest = self._oldest_open_step()
        if charges[-1][0] < oldest:
            return ()
        return tuple((step, _lower(low, level)) for step, low in charges if step >= oldest)


def _lower(lowest: int, level: int) -> int:
    return level if lowest == _NOT_OBSERVED or level < lowest else lowest
