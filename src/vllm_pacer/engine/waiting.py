"""The queue of waiting requests: it offers to vLLM what may be admitted, and holds back the rest.

vLLM looks at the head of its queue, pops what it admits or skips, and puts back what it skipped. In
this queue the head is the next request in fair order among those that may be admitted now, and the
queue counts as empty when there is none. Its length and what it iterates over are all the requests
that wait, as everybody else expects. Whose turn is next is kept by `Lines`; here is added what vLLM
asks.

What has been popped and was not put back is resident, or will be when it is loaded.
"""

from collections.abc import Callable, Iterable

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_pacer.lines import Line, Lines, Place
from vllm_pacer.pauses import User


class WaitingQueue(Lines[Request], RequestQueue):
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
        super().__init__(share_of)
        self._user_of = user_of
        self._by_priority = by_priority
        self._may_admit = may_admit
        self._on_admit = on_admit
        self._on_return = on_return
        self._first, self._last = 0, 0  # places given out at either end
        self._offer: tuple[Line[Request], Request] | None = None  # of the current step

    # --- what vLLM asks ---------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Return whether something may be admitted now."""
        return bool(self.requests) and self.has_turns() and self._find_offer() is not None

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
        self.end_turn(line)
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
        self.discard(request)
        self._on_admit(line.user, request)
        if line:
            self.give_another_turn(line)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request.

        Raises:
            ValueError: It does not wait here.
        """
        if self.discard(request) is None:
            raise ValueError(f"{request.request_id} does not wait")

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove those of the requests that wait here."""
        for request in requests:
            self.discard(request)

    def discard(self, request: Request) -> Line[Request] | None:
        """Remove a request if it waits here."""
        if self._offer is not None and self._offer[1] is request:
            self._offer = None
        return super().discard(request)

    # --- what the scheduler asks ------------------------------------------------------------

    def begin_step(self, now_ns: int) -> list[User[Request]]:
        """Forget what was offered in the last step, and give turns anew."""
        self._offer = None
        return super().begin_step(now_ns)

    # --- inside -----------------------------------------------------------------------------

    def _add(self, request: Request, first: bool) -> Line[Request]:
        return self.add(self._user_of(request), request, self._place(request, first))

    def _place(self, request: Request, first: bool) -> Place:
        if self._by_priority:
            return request.priority, request.arrival_time, request.request_id
        if first:
            self._first -= 1
            return 0, self._first, ""
        self._last += 1
        return 0, self._last, ""

    def _find_offer(self) -> tuple[Line[Request], Request] | None:
        if self._offer is not None:
            return self._offer
        while (line := self.take_turn()) is not None:
            request = line.head()[1]
            if self._may_admit(line.user, request):
                self._offer = line, request
                return self._offer
        return None
