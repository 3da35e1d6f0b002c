"""Which resident requests are paused, whose turn is next, and when.

The rules:

1. A user that reaches its quota has all its requests that need a token paused, in the order in
   which they were served last. When tokens become available, as many go on as there are tokens,
   first those of the best priority class, within it those that have waited longest. So the quota
   rotates between the streams of one user.
2. A user's wake-up is the instant of its next token. Nobody looks at a user before that: a paused
   request costs nothing per step, and a thousand paused users cost as much as one.
3. No more go on than there is room for. Users that are ready but found no room keep their place.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

from vllm_pacer.fairness import Member
from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.wake_ups import WakeUp, WakeUps

R = TypeVar("R", bound=Hashable)


class User(Generic[R]):
    """A user with live requests; `paused` holds its paused ones by priority class."""

    __slots__ = ("account", "loads", "member", "one_token", "owed_tokens", "paused")

    def __init__(self, account: Account, member: Member) -> None:
        self.account = account
        self.member = member
        self.one_token = account, 1  # the charge of a decode step, made once
        self.paused: dict[int, deque[R]] = {}
        self.loads = 0  # its requests that hold KV blocks, and need a token to be let in
        self.owed_tokens = 0  # what its requests outside may take before its paused ones

    def first_paused(self, count: int) -> dict[int, int]:
        """Return how many of the first `count` paused requests are of each class."""
        first: dict[int, int] = {}
        for priority in sorted(self.paused):
            first[priority] = min(count, len(self.paused[priority]))
            count -= first[priority]
        return first


class Pauses(Generic[R]):
    """The paused requests of all users.

    Args:
        limiter: Tells how many tokens a user can take now, and when it can take the next.
    """

    def __init__(self, limiter: OutputRateLimiter) -> None:
        self._limiter = limiter
        self._place: dict[R, tuple[User[R], int]] = {}
        self.requests = self._place.keys()
        """The paused requests as they are at any time, in the order in which they were paused."""
        self._wake_ups: WakeUps[User[R]] = WakeUps()
        self._users: dict[User[R], None] = {}
        self.changes = 0  # how often a request was paused, resumed or dropped

    def pause(self, request: R, user: User[R], priority: int, wake_ns: int) -> None:
        """Pause a request, behind the others of its user and class, until `wake_ns` at most."""
        user.paused.setdefault(priority, deque()).append(request)
        self._place[request] = user, priority
        self.changes += 1
        self._users[user] = None
        self.wake_by(user, wake_ns)

    def wake_by(self, user: User[R], wake_ns: int) -> None:
        """See to it that the user is looked at by `wake_ns`; no effect if nothing is paused."""
        if user.paused:
            set_ns = self._wake_ups.of(user)
            if set_ns is None or wake_ns < set_ns:
                self._wake_ups.set(user, wake_ns)

    def owe(self, user: User[R]) -> None:
        """Leave the user's next token, once, to a request of it that is not resident."""
        user.owed_tokens = 1

    def wake_ns(self, user: User[R]) -> int | None:
        """Return the instant at which the user is looked at, or `None`."""
        return self._wake_ups.of(user)

    def next_wake_ns(self) -> int | None:
        """Return the instant at which the next paused request may go on, or `None`."""
        return self._wake_ups.next_ns()

    def ready(self, now_ns: int, most: int) -> dict[User[R], int]:
        """Return how many paused requests could go on now, by user, those that are due first.

        Args:
            now_ns: The time now.
            most: Not more than so many are counted.
        """
        due: list[WakeUp[User[R]]] = []
        ready: dict[User[R], int] = {}
        count = 0
        while count < most and (wake_up := self._wake_ups.pop_due(now_ns)) is not None:
            due.append(wake_up)
            user = wake_up.item
            paused = sum(map(len, user.paused.values()))
            ready[user] = min(self._tokens(user), paused, most - count)
            count += ready[user]
        for wake_up in due:
            self._wake_ups.put_back(wake_up)
        return ready

    def resume(self, now_ns: int, room: int) -> list[R]:
        """Take out up to `room` requests that can go on now and return them."""
        resumed: list[R] = []
        while len(resumed) < room and (wake_up := self._wake_ups.pop_due(now_ns)) is not None:
            resumed += self._resume(wake_up.item, now_ns, room - len(resumed))
        return resumed

    def resume_of(self, user: User[R], now_ns: int, count: int) -> list[R]:
        """Take out up to `count` requests of a user that can go on now and return them."""
        self._wake_ups.drop(user)
        return self._resume(user, now_ns, count)

    def _resume(self, user: User[R], now_ns: int, most: int) -> list[R]:
        available = self._limiter.available(user.account)
        tokens = max(available - user.owed_tokens, 0)
        taken = self._take(user, min(tokens, most))
        if user.paused:
            # What was left for want of room is still there in the next step.
            next_token = len(taken) + 1 if len(taken) == tokens else 1
            ready_ns = self._limiter.account_ready_at_ns(user.account, next_token)
            # What is owed and not taken in this step is for the paused in the next.
            self._wake_ups.set(user, max(ready_ns, now_ns + 1) if user.owed_tokens else ready_ns)
        if available:
            user.owed_tokens = 0
        return taken

    def drop(self, request: R) -> None:
        """Forget a request that is no longer resident; no effect if it is not paused."""
        if request in self._place:
            user, priority = self._place.pop(request)
            self.changes += 1
            user.paused[priority].remove(request)
            self._forget_if_empty(user, priority)

    def users(self) -> dict[User[R], None]:
        """Return the users that have paused requests."""
        return self._users

    def _tokens(self, user: User[R]) -> int:
        """Return how many paused requests of the user may go on now."""
        return max(self._limiter.available(user.account) - user.owed_tokens, 0)

    def _take(self, user: User[R], count: int) -> list[R]:
        taken: list[R] = []
        while user.paused and len(taken) < count:
            priority = min(user.paused)
            queue = user.paused[priority]
            while queue and len(taken) < count:
                request = queue.popleft()
                del self._place[request]
                self.changes += 1
                taken.append(request)
            self._forget_if_empty(user, priority)
        return taken

    def _forget_if_empty(self, user: User[R], priority: int) -> None:
        if not user.paused[priority]:
            del user.paused[priority]
            if not user.paused:
                self._wake_ups.drop(user)
                del self._users[user]
