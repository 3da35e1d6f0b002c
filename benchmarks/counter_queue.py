"""The Virtual Token Counter as an order for vLLM's waiting queue, to compare with."""

from collections import deque
from collections.abc import Iterable, Iterator

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


class CounterQueue(RequestQueue):
    """Requests of the user that was served least come first (Sheng et al., OSDI 2024, algorithm 2).

    A user that begins to wait is lifted to the least counter of those that wait, so nobody saves
    up service. A prompt token counts once, when its request is admitted; an output token counts
    twice, when it is served.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Request]] = {}
        self._counters: dict[str, float] = {}
        self._left_last = ""

    def charge(self, user: str, output_tokens: int) -> None:
        """Count output tokens that were served."""
        self._counters[user] += 2 * output_tokens

    def add_request(self, request: Request) -> None:
        """Add a request."""
        user = _user(request)
        own = self._counters.get(user, 0.0)
        if user not in self._waiting:
            if self._waiting:
                least = min(self._counters[each] for each in self._waiting)
            else:
                least = self._counters.get(self._left_last, 0.0)
            self._counters[user] = max(own, least)
        self._waiting.setdefault(user, deque()).append(request)

    def _next_user(self) -> str:
        return min(self._waiting, key=self._counters.__getitem__)

    def peek_request(self) -> Request:
        """Return the next request."""
        return self._waiting[self._next_user()][0]

    def pop_request(self) -> Request:
        """Take out the next request; its prompt counts."""
        user = self._next_user()
        request = self._waiting[user].popleft()
        if not self._waiting[user]:
            del self._waiting[user]
            self._left_last = user
        self._counters[user] += request.num_prompt_tokens
        return request

    def prepend_request(self, request: Request) -> None:
        """Put a request back."""
        user = _user(request)
        self._counters[user] -= request.num_prompt_tokens
        self._waiting.setdefault(user, deque()).appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put requests back."""
        for request in requests:
            self.prepend_request(request)

    def remove_request(self, request: Request) -> None:
        """Remove a request."""
        self._waiting[_user(request)].remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove requests."""
        for request in requests:
            self.remove_request(request)

    def __bool__(self) -> bool:
        """Return whether a request waits."""
        return bool(self._waiting)

    def __len__(self) -> int:
        """Return how many wait."""
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests."""
        return iter([each for line in self._waiting.values() for each in line])


def _user(request: Request) -> str:
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args is not None
    return str(request.sampling_params.extra_args["output_rate_user"])
