"""Who waits, and whose turn is next.

The rules:

1. Each user has a line. Its first request has the line's turn.
2. Turns come in the order of the requests' class, then of the users' shares, then of arrival.
3. A line has one turn in a step, and another one if a request of it was taken out.
4. A parked user has no turn before an instant.

A user that holds nothing has no share, so its turn stays the same from step to step: these turns
are kept in order, and a step touches only those that it takes. The others are as many as there are
residents at most; theirs are put in order in each step anew. So a step costs the same with ten
thousand requests that wait for room as with a hundred, whoever sent them.
"""

import heapq
from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from vllm_pacer.pauses import User
from vllm_pacer.wake_ups import WakeUps

R = TypeVar("R", bound=Hashable)

Place = tuple[int, float, str]
"""A request's class, then what its order of arrival is told by: less comes first."""

_SMALL_HEAP = 64


class Turn(NamedTuple, Generic[R]):
    """When a line's turn comes: less comes first."""

    priority_class: int
    share: float
    place: Place
    number: int  # no two are the same, though places are under the priority policy
    line: "Line[R]"


class Line(Generic[R]):
    """The waiting requests of one user, in order."""

    __slots__ = ("_heap", "_places", "turn", "user")

    def __init__(self, user: User[R]) -> None:
        self.user = user
        self.turn: Turn[R] | None = None  # among those that are kept in order
        self._places: dict[R, Place] = {}
        self._heap: list[tuple[Place, R]] = []  # may hold requests that have left

    def __len__(self) -> int:
        return len(self._places)

    def add(self, request: R, place: Place) -> None:
        """Add a request at its place."""
        self._places[request] = place
        heapq.heappush(self._heap, (place, request))

    def remove(self, request: R) -> None:
        """Remove a request."""
        del self._places[request]
        if len(self._heap) > 2 * len(self._places) + _SMALL_HEAP:
            self._heap = [(place, each) for each, place in self._places.items()]
            heapq.heapify(self._heap)

    def place_of(self, request: R) -> Place:
        """Return a request's place."""
        return self._places[request]

    def head(self) -> tuple[Place, R]:
        """Return the first request and its place."""
        heap = self._heap
        while self._places.get(heap[0][1]) is not heap[0][0]:
            heapq.heappop(heap)
        return heap[0]


class Lines(Generic[R]):
    """The lines of all users that wait.

    Args:
        share_of: Gives a user's share. It is 0 until a request of the user has been taken out.
    """

    def __init__(self, share_of: Callable[[User[R]], float]) -> None:
        self._share_of = share_of
        self._lines: dict[User[R], Line[R]] = {}
        self._line_of: dict[R, Line[R]] = {}
        self.requests = self._line_of.keys()
        """The requests that wait, as they are at any time and in no order."""
        self._parked: WakeUps[User[R]] = WakeUps()
        self._in_order: list[Turn[R]] = []  # without a share; may hold turns that do not count
        self._count = 0
        self._with_share: dict[User[R], Line[R]] = {}
        # Of the current step.
        self._turns: list[Turn[R]] | None = None  # of those with a share, and the second ones
        self._had_turn: list[Line[R]] = []

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._line_of)

    def __iter__(self) -> Iterator[R]:
        """Iterate over the requests by class and arrival."""
        placed = [(line.place_of(each), each) for each, line in self._line_of.items()]
        return iter([request for _, request in sorted(placed, key=itemgetter(0))])

    def add(self, user: User[R], request: R, place: Place) -> Line[R]:
        """Add a request to its user's line, and return the line."""
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = Line(user)
        is_new = not line
        line.add(request, place)
        self._line_of[request] = line
        if is_new or line.turn is not None:
            self._enqueue(line)
        return line

    def discard(self, request: R) -> Line[R] | None:
        """Remove a request; return the line in which it stood, or `None` if it does not wait."""
        line = self._line_of.pop(request, None)
        if line is not None:
            line.remove(request)
            if not line:
                line.turn = None
                del self._lines[line.user]
                self._with_share.pop(line.user, None)
                self._parked.drop(line.user)
                if not self._lines:  # no turn counts any more
                    self._in_order.clear()
                    self._had_turn.clear()
                    self._turns = None
            elif line.turn is not None:
                self._enqueue(line)
        return line

    def length_of(self, user: User[R]) -> int:
        """Return how many requests of the user wait."""
        line = self._lines.get(user)
        return 0 if line is None else len(line)

    # --- turns --------------------------------------------------------------------------------

    def begin_step(self, now_ns: int) -> list[User[R]]:
        """Give a turn to those that had theirs in the last step or whose instant has come.

        Returns:
            The users that were parked and are not any more.
        """
        self._turns = None
        if self._had_turn:
            for line in self._had_turn:
                if line:
                    self._enqueue(line)
            self._had_turn.clear()
        unparked: list[User[R]] = []
        while self._parked and (wake_up := self._parked.pop_due(now_ns)) is not None:
            self._enqueue(self._lines[wake_up.item])
            unparked.append(wake_up.item)
        return unparked

    def take_turn(self) -> Line[R] | None:
        """Return the line whose turn is next in this step, or `None`."""
        turns = self._turns_of_this_step()
        # Since the turns were put in order a line may have become empty, or its user parked.
        while turns and (not turns[0].line or turns[0].line.user in self._parked):
            heapq.heappop(turns)
        first = self._first_in_order()
        if turns and (first is None or turns[0] < first):
            return heapq.heappop(turns).line
        if first is None:
            return None
        heapq.heappop(self._in_order)
        first.line.turn = None
        self._had_turn.append(first.line)
        return first.line

    def give_another_turn(self, line: Line[R]) -> None:
        """Give a line, of which a request was taken out, another turn in this step."""
        heapq.heappush(self._turns_of_this_step(), self._turn(line))

    def end_turn(self, line: Line[R]) -> None:
        """Give a line no turn any more in this step."""
        turns = [each for each in self._turns_of_this_step() if each.line is not line]
        heapq.heapify(turns)
        self._turns = turns
        if line.turn is not None:
            line.turn = None
            self._had_turn.append(line)

    def heads(self, most: int) -> list[tuple[User[R], R]]:
        """Return the first requests of the users that are not parked, in order of their turns.

        In the middle of a step those are missing that had their turn.
        """
        turns = self._turns_of_holders()
        kept: list[Turn[R]] = []
        while len(kept) < most and self._first_in_order() is not None:
            kept.append(heapq.heappop(self._in_order))
        for turn in kept:
            heapq.heappush(self._in_order, turn)
        turns += kept
        return [(turn.line.user, turn.line.head()[1]) for turn in heapq.nsmallest(most, turns)]

    # --- parked users -------------------------------------------------------------------------

    def park(self, user: User[R], until_ns: int) -> None:
        """Give the user no turn before an instant."""
        self._parked.set(user, until_ns)

    def unpark(self, user: User[R]) -> None:
        """Give the user a turn again; no effect if it is not parked."""
        if user in self._parked:
            self._parked.drop(user)
            self._enqueue(self._lines[user])

    def is_parked(self, user: User[R]) -> bool:
        """Return whether the user is parked."""
        return user in self._parked

    def parked(self, until_ns: int) -> Iterator[tuple[User[R], R]]:
        """Yield the first requests of the users that are parked no longer than to an instant."""
        for user in self._parked.due_by(until_ns):
            yield user, self._lines[user].head()[1]

    def next_wake_ns(self) -> int | None:
        """Return the instant at which the next parked user has a turn again, or `None`."""
        return self._parked.next_ns()

    def has_turns(self) -> bool:
        """Return whether a user waits that is not parked."""
        return len(self._lines) > len(self._parked)

    # --- inside -------------------------------------------------------------------------------

    def _turn(self, line: Line[R]) -> Turn[R]:
        place = line.head()[0]
        self._count += 1
        return Turn(place[0], self._share_of(line.user), place, self._count, line)

    def _enqueue(self, line: Line[R]) -> None:
        turn = self._turn(line)
        if turn.share:
            line.turn = None
            self._with_share[line.user] = line
        else:
            self._with_share.pop(line.user, None)
            line.turn = turn
            heapq.heappush(self._in_order, turn)
            self._compact()

    def _turns_of_this_step(self) -> list[Turn[R]]:
        if self._turns is None:
            for line in [*self._with_share.values()]:
                if not self._share_of(line.user):
                    self._enqueue(line)  # it holds nothing any more
            self._turns = self._turns_of_holders()
            heapq.heapify(self._turns)
        return self._turns

    def _turns_of_holders(self) -> list[Turn[R]]:
        parked = self._parked
        return [self._turn(line) for user, line in self._with_share.items() if user not in parked]

    def _first_in_order(self) -> Turn[R] | None:
        in_order = self._in_order
        while in_order:
            turn = in_order[0]
            if turn.line.turn is turn:
                if turn.line.user not in self._parked:
                    return turn
                turn.line.turn = None  # it gets another when it is not parked any more
            heapq.heappop(in_order)
        return None

    def _compact(self) -> None:
        """Drop the turns that do not count before they outnumber the others."""
        if len(self._in_order) > 2 * len(self._lines) + _SMALL_HEAP:
            self._in_order = [turn for turn in self._in_order if turn.line.turn is turn]
            heapq.heapify(self._in_order)
