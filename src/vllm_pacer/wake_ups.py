"""Who is to be looked at when."""

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

_SMALL_HEAP = 64


class WakeUp(NamedTuple, Generic[T]):
    """When to look at `item`; of those at one instant, first what was set first."""

    at_ns: int
    order: int
    item: T


class WakeUps(Generic[T]):
    """At most one wake-up for each of many, in order of time.

    Whoever is not due costs nothing, however many there are.
    """

    def __init__(self) -> None:
        self._due_ns: dict[T, int] = {}
        self._heap: list[WakeUp[T]] = []  # may hold wake-ups that no longer count
        self._count = 0
        self._compact_above = _SMALL_HEAP

    def __len__(self) -> int:
        """Return the number of those that have a wake-up."""
        return len(self._due_ns)

    def __contains__(self, item: T) -> bool:
        """Return whether `item` has a wake-up."""
        return item in self._due_ns

    def of(self, item: T) -> int | None:
        """Return the instant of the wake-up of `item`, or `None`."""
        return self._due_ns.get(item)

    def set(self, item: T, at_ns: int) -> None:
        """Wake `item` at `at_ns`, and not at another time."""
        self._due_ns[item] = at_ns
        self._count += 1
        heapq.heappush(self._heap, WakeUp(at_ns, self._count, item))
        if len(self._heap) > self._compact_above:
            self._compact()

    def drop(self, item: T) -> None:
        """Do not wake `item`; no effect if it has no wake-up."""
        self._due_ns.pop(item, None)

    def due_by(self, at_ns: int) -> Iterator[T]:
        """Yield those that are due by an instant, in no order.

        Whoever is due later is not looked at, nor who comes after the last one that is taken.
        """
        heap, seen, places = self._heap, set[T](), [0]
        while places:
            place = places.pop()
            if place >= len(heap) or heap[place].at_ns > at_ns:
                continue  # those below it are due later still
            places += 2 * place + 1, 2 * place + 2
            due_ns, _, item = heap[place]
            if self._due_ns.get(item) == due_ns and item not in seen:
                seen.add(item)
                yield item

    def next_ns(self) -> int | None:
        """Return the instant of the next wake-up, or `None`."""
        heap, due_ns = self._heap, self._due_ns
        while heap and due_ns.get(heap[0].item) != heap[0].at_ns:
            heapq.heappop(heap)
        return heap[0].at_ns if heap else None

    def pop_due(self, now_ns: int) -> WakeUp[T] | None:
        """Take out the earliest wake-up if it is due, or return `None`."""
        next_ns = self.next_ns()
        if next_ns is None or next_ns > now_ns:
            return None
        wake_up = heapq.heappop(self._heap)
        del self._due_ns[wake_up.item]
        return wake_up

    def put_back(self, wake_up: WakeUp[T]) -> None:
        """Undo `pop_due`: the wake-up has its old place again."""
        self._due_ns[wake_up.item] = wake_up.at_ns
        heapq.heappush(self._heap, wake_up)

    def _compact(self) -> None:
        """Drop what no longer counts, which may lie far ahead, before it outnumbers the rest."""
        self._heap = [entry for entry in self._heap if self._due_ns.get(entry.item) == entry.at_ns]
        heapq.heapify(self._heap)
        self._compact_above = 2 * len(self._heap) + _SMALL_HEAP
