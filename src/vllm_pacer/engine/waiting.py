"""The queue of waiting requests: it offers to vLLM what may be admitted, and holds back the rest.

vLLM looks at the head of its queue, pops what it admits or skips, and puts back what it skipped. In
this queue the head is the next request in fair order among those that may be admitted now, and the
queue counts as empty when there is none. So a user's ten thousandth waiting request costs a step
nothing. Its length and what it iterates over are all the requests that wait, as everybody else
expects.

What has been popped and was not put back is resident.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_pacer.pauses import User
from vllm_pacer.wake_ups import WakeUps

_Place = tuple[int, float, str]
"""Class, then order of arrival: less comes first."""

_Turn = tuple[int, float, _Place, "Line"]
"""Class, the user's share, the place of its first request: less comes first."""

_SMALL_HEAP = 64


class Line:
    """The waiting requests of one user, in order."""

    __slots__ = ("_heap", "_places", "user")

    def __init__(self, user: User[Request]) -> None:
        self.user = user
        self._places: dict[Request, _Place] = {}
        self._heap: list[tuple[_Place, Request]] = []  # may hold requests that have left

    def __len__(self) -> int:
        return len(self._places)

    def add(self, request: Request, place: _Place) -> None:
        """Add a request at its place."""
        self._places[request] = place
        heapq.heappush(self._heap, (place, request))

    def remove(self, request: Request) -> None:
        """Remove a request."""
        del self._places[request]
        if len(self._heap) > 2 * len(self._places) + _SMALL_HEAP:
            self._heap = [(place, each) for each, place in self._places.items()]
            heapq.heapify(self._heap)

    def place_of(self, request: Request) -> _Place:
        """Return a request's place."""
        return self._places[request]

    def head(self) -> tuple[_Place, Request]:
        """Return the first request and its place."""
        heap = self._heap
        while self._places.get(heap[0][1]) is not heap[0][0]:
            heapq.heappop(heap)
        return heap[0]


class WaitingQueue(RequestQueue):
    """vLLM's waiting queue, in fair order.

    Args:
        user_of: Gives a request's user.
        by_priority: Whether vLLM's priority policy is on.
        share_of: Gives a user's share; users with a smaller one come first within a class.
        may_admit: Whether a request may become resident in this step. If not, nothing of its user
            is offered in this step any more.
        on_admit: Called with a request that is popped.
        on_return: Called with a request that is put back.
    """

    def __init__(
        self,
        user_of: Callable[[Request], User[Request]],
        by_priority: bool,
        share_of: Callable[[User[Request]], float],
        may_admit: Callable[[User[Request], Request], bool],
        on_admit: Callable[[User[Request], Request], None],
        on_return: Callable[[User[Request], Request], object],
    ) -> None:
        self._user_of = user_of
        self._by_priority = by_priority
        self._share_of = share_of
        self._may_admit = may_admit
        self._on_admit = on_admit
        self._on_return = on_return
        self._lines: dict[User[Request], Line] = {}
        self._line_of: dict[Request, Line] = {}
        self._first, self._last = 0, 0  # places given out at either end
        self._parked: WakeUps[User[Request]] = WakeUps()
        # Of the current step.
        self._turns: list[_Turn] | None = None
        self._offer: tuple[Line, Request] | None = None

    # --- what vLLM asks ---------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Return whether something may be admitted now."""
        return bool(self._lines) and self._find_offer() is not None

    def __len__(self) -> int:
        """Return the number of all waiting requests."""
        return len(self._line_of)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests, in order of arrival."""
        placed = [(line.place_of(each), each) for each, line in self._line_of.items()]
        return iter([request for _, request in sorted(placed, key=itemgetter(0))])

    def __getitem__(self, index: int) -> Request:
        """Return a waiting request by its place, for vLLM's own tests."""
        return list(self)[index]

    def add_request(self, request: Request) -> None:
        """Add a request at the end of its user's line."""
        self._add(request, first=False)

    def prepend_request(self, request: Request) -> None:
        """Put a request back to the head of its user's line, behind all others in this step."""
        line = self._add(request, first=True)
        self._on_return(line.user, request)
        if self._turns is not None:
            self._turns = [each for each in self._turns if each[3] is not line]
            heapq.heapify(self._turns)
            if self._offer is not None and self._offer[0] is line:
                self._offer = None

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put requests back; the first of them comes to lie last, as in vLLM's own queue."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """Return the next request to be admitted.

        Raises:
            IndexError: Nothing may be admitted now.
        """
        offer = self._find_offer()
        if offer is None:
            raise IndexError("peek from a queue that offers nothing")
        return offer[1]

    def pop_request(self) -> Request:
        """Take out the next request to be admitted.

        Raises:
            IndexError: Nothing may be admitted now.
        """
        request = self.peek_request()
        assert self._offer is not None
        line, self._offer = self._offer[0], None
        self._discard(request)
        self._on_admit(line.user, request)
        if line and self._turns is not None:
            heapq.heappush(self._turns, self._turn(line))
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request.

        Raises:
            ValueError: It does not wait here.
        """
        if not self._discard(request):
            raise ValueError(f"{request.request_id} does not wait")

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of the requests that wait here."""
        for request in requests:
            self._discard(request)

    # --- what the scheduler asks ------------------------------------------------------------

    def begin_step(self, now_ns: int) -> None:
        """Forget what was found out in the last step, and look again at those whose time came."""
        self._turns = None
        self._offer = None
        while self._parked and self._parked.pop_due(now_ns) is not None:
            pass

    def park(self, user: User[Request], until_ns: int) -> None:
        """Offer nothing of the user before an instant."""
        self._parked.set(user, until_ns)

    def unpark(self, user: User[Request]) -> None:
        """Look at the user again in the next step; no effect if it is not parked."""
        self._parked.drop(user)

    def next_wake_ns(self) -> int | None:
        """Return the instant at which the next parked user is looked at, or `None`."""
        return self._parked.next_ns()

    def has_turns(self) -> bool:
        """Return whether a user waits that is not parked."""
        return len(self._lines) > len(self._parked)

    def length_of(self, user: User[Request]) -> int:
        """Return how many requests of the user wait."""
        return len(self._lines[user])

    def first_of_each_user(self, until_ns: int) -> Iterator[tuple[User[Request], Request]]:
        """Iterate over the first request of every user that is not parked beyond an instant."""
        for user, line in self._lines.items():
            wake_ns = self._parked.of(user)
            if wake_ns is None or wake_ns <= until_ns:
                yield user, line.head()[1]

    def heads(self, most: int) -> list[tuple[User[Request], Request]]:
        """Return the first request of each user that is not parked, in the order of admission."""
        turns = heapq.nsmallest(most, self._turns_to_come())
        return [(line.user, line.head()[1]) for _, _, _, line in turns]

    # --- inside -----------------------------------------------------------------------------

    def _add(self, request: Request, first: bool) -> Line:
        user = self._user_of(request)
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = Line(user)
        line.add(request, self._place(request, first))
        self._line_of[request] = line
        return line

    def _discard(self, request: Request) -> bool:
        line = self._line_of.pop(request, None)
        if line is None:
            return False
        line.remove(request)
        if not line:
            del self._lines[line.user]
            self._parked.drop(line.user)
        if self._offer is not None and self._offer[1] is request:
            self._offer = None
        return True

    def _place(self, request: Request, first: bool) -> _Place:
        if self._by_priority:
            return request.priority, request.arrival_time, request.request_id
        if first:
            self._first -= 1
            return 0, self._first, ""
        self._last += 1
        return 0, self._last, ""

    def _turn(self, line: Line) -> _Turn:
        place = line.head()[0]
        return place[0], self._share_of(line.user), place, line

    def _turns_to_come(self) -> list[_Turn]:
        parked = self._parked
        return [self._turn(line) for user, line in self._lines.items() if user not in parked]

    def _find_offer(self) -> tuple[Line, Request] | None:
        if self._offer is not None:
            return self._offer
        turns = self._turns
        if turns is None:
            turns = self._turns = self._turns_to_come()
            heapq.heapify(turns)
        while turns:
            line = heapq.heappop(turns)[3]
            if line:
                request = line.head()[1]
                if self._may_admit(line.user, request):
                    self._offer = line, request
                    return self._offer
        return None
