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

import heapq
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from vllm_pacer.limiter import Account, OutputRateLimiter

R = TypeVar("R", bound=Hashable)

_SMALL_HEAP = 64


class User(Generic[R]):
    """A user with live requests; `paused` holds its paused ones by priority class."""

    __slots__ = ("account", "one_token", "owed_tokens", "paused", "wake_ns")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.one_token = account, 1  # the charge of a decode step, made once
        self.paused: dict[int, deque[R]] = {}
        self.wake_ns: int | None = None  # the entry in the wake-up queue that counts
        self.owed_tokens = 0  # what its requests outside may take before its paused ones


class Pauses(Generic[R]):
    """The paused requests of all users.

    Args:
        limiter: Tells how many tokens a user can take now, and when it can take the next.
    """

    def __init__(self, limiter: OutputRateLimiter) -> None:
        self._limiter = limiter
        self._place: dict[R, tuple[User[R], int]] = {}
        self._wake_ups: list[tuple[int, int, User[R]]] = []
        self._wake_up_count = 0
        self._compact_above = _SMALL_HEAP

    def __len__(self) -> int:
        """Return the number of paused requests."""
        return len(self._place)

    def __contains__(self, request: R) -> bool:
        """Return whether the request is paused."""
        return request in self._place

    def __iter__(self) -> Iterator[R]:
        """Iterate over the paused requests, in the order in which they were paused."""
        return iter(self._place)

    def pause(self, request: R, user: User[R], priority: int, wake_ns: int) -> None:
        """Pause a request, behind the others of its user and class, until `wake_ns` at most."""
        user.paused.setdefault(priority, deque()).append(request)
        self._place[request] = user, priority
        self.wake_by(user, wake_ns)

    def wake_by(self, user: User[R], wake_ns: int) -> None:
        """See to it that the user is looked at by `wake_ns`; no effect if nothing is paused."""
        if user.paused and (user.wake_ns is None or wake_ns < user.wake_ns):
            self._enqueue(user, wake_ns)

    def owe(self, user: User[R]) -> None:
        """Leave the user's next token, once, to a request of it that is not resident."""
        user.owed_tokens = 1

    def next_wake_ns(self) -> int | None:
        """Return the instant at which the next paused request may go on, or `None`."""
        wake_ups = self._wake_ups
        while wake_ups and wake_ups[0][2].wake_ns != wake_ups[0][0]:
            heapq.heappop(wake_ups)  # superseded by an earlier one
        return wake_ups[0][0] if wake_ups else None

    def ready(self, now_ns: int, most: int) -> int:
        """Return how many paused requests could go on now, counted no further than `most`."""
        due: dict[User[R], tuple[int, int, User[R]]] = {}
        count = 0
        while count < most:
            wake_ns = self.next_wake_ns()
            if wake_ns is None or wake_ns > now_ns:
                break
            entry = heapq.heappop(self._wake_ups)
            user = entry[2]
            if user not in due:
                due[user] = entry
                count += min(self._tokens(user), sum(map(len, user.paused.values())))
        for entry in due.values():
            heapq.heappush(self._wake_ups, entry)
        return min(count, most)

    def resume(self, now_ns: int, room: int) -> list[R]:
        """Take out up to `room` requests that can go on now and return them."""
        resumed: list[R] = []
        while len(resumed) < room:
            wake_ns = self.next_wake_ns()
            if wake_ns is None or wake_ns > now_ns:
                break
            _, _, user = heapq.heappop(self._wake_ups)
            tokens = self._tokens(user)
            taken = self._take(user, min(tokens, room - len(resumed)))
            resumed += taken
            if user.paused:
                # What was left for want of room is still there in the next step.
                next_token = len(taken) + 1 if len(taken) == tokens else 1
                ready_ns = self._limiter.account_ready_at_ns(user.account, next_token)
                # What is owed and not taken in this step is for the paused in the next.
                self._enqueue(user, max(ready_ns, now_ns + 1) if user.owed_tokens else ready_ns)
            else:
                user.wake_ns = None
            user.owed_tokens = 0
        return resumed

    def drop(self, request: R) -> None:
        """Forget a request that is no longer resident; no effect if it is not paused."""
        if request in self._place:
            user, priority = self._place.pop(request)
            user.paused[priority].remove(request)
            self._forget_if_empty(user, priority)

    def victims(self) -> Iterator[R]:
        """Iterate over the paused requests, those whose turn comes last first."""
        users = dict.fromkeys(user for user, _ in self._place.values())
        for user in sorted(users, key=_wake_ns, reverse=True):
            for priority in sorted(user.paused, reverse=True):
                yield from reversed(user.paused[priority])

    def _tokens(self, user: User[R]) -> int:
        """Return how many paused requests of the user may go on now."""
        available = self._limiter.available(user.account)
        user.owed_tokens = min(user.owed_tokens, available)
        return available - user.owed_tokens

    def _take(self, user: User[R], count: int) -> list[R]:
        taken: list[R] = []
        while user.paused and len(taken) < count:
            priority = min(user.paused)
            queue = user.paused[priority]
            while queue and len(taken) < count:
                request = queue.popleft()
                del self._place[request]
                taken.append(request)
            self._forget_if_empty(user, priority)
        return taken

    def _forget_if_empty(self, user: User[R], priority: int) -> None:
        if not user.paused[priority]:
            del user.paused[priority]
            if not user.paused:
                user.wake_ns = None

    def _enqueue(self, user: User[R], wake_ns: int) -> None:
        user.wake_ns = wake_ns
        self._wake_up_count += 1
        heapq.heappush(self._wake_ups, (wake_ns, self._wake_up_count, user))
        if len(self._wake_ups) > self._compact_above:
            self._compact()

    def _compact(self) -> None:
        """Drop superseded wake-ups, which may lie far ahead, before they outnumber the others."""
        self._wake_ups = [entry for entry in self._wake_ups if entry[2].wake_ns == entry[0]]
        heapq.heapify(self._wake_ups)
        self._compact_above = 2 * len(self._wake_ups) + _SMALL_HEAP


def _wake_ns(user: User[R]) -> int:
    assert user.wake_ns is not None, "a user with paused requests has a wake-up"
    return user.wake_ns
