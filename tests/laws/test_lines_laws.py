"""The order of turns, compared with one that is sorted anew every time."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_pacer.fairness import Member
from vllm_pacer.limiter import Account
from vllm_pacer.lines import Lines
from vllm_pacer.pauses import User

USERS = [User(Account(name, None), Member(name, 1)) for name in "abcde"]


class AnyOrder(RuleBasedStateMachine):
    """Requests come and go, shares change, users are parked, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares: dict[User[str], float] = dict.fromkeys(USERS, 0.0)
        self.lines: Lines[str] = Lines(self.shares.__getitem__)
        self.waiting: dict[str, tuple[User[str], tuple[int, float, str]]] = {}
        self.out: list[tuple[str, User[str], tuple[int, float, str]]] = []
        self.parked: dict[User[str], int] = {}
        self.now_ns = 0
        self.count = 0
        self.turn_over: set[User[str]] = set()
        self.is_under_way = False
        self.lines.begin_step(0)

    def head(self, user: User[str]) -> tuple[tuple[int, float, str], str] | None:
        """The user's first request and its place."""
        return min(
            ((place, each) for each, (owner, place) in self.waiting.items() if owner is user),
            default=None,
        )

    def expected(self) -> list[User[str]]:
        """The users whose turn is to come in this step, in order."""
        turns = []
        for user in USERS:
            head = self.head(user)
            if head is not None and user not in self.parked and user not in self.turn_over:
                turns.append((head[0][0], self.shares[user], head[0], user.account.user, user))
        return [turn[-1] for turn in sorted(turns)]

    @rule(user=st.sampled_from(USERS), priority=st.integers(0, 2))
    def arrive(self, user: User[str], priority: int) -> None:
        """A request arrives between two steps."""
        self.next_step(0)
        self.count += 1
        request = str(self.count)
        self.waiting[request] = user, (priority, self.count, "")
        self.lines.add(user, request, self.waiting[request][1])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A request that waits is aborted."""
        request = data.draw(st.sampled_from(sorted(self.waiting)))
        self.next_step(0)
        user, _ = self.waiting.pop(request)
        assert self.lines.discard(request).user is user
        assert self.lines.discard(request) is None
        if self.head(user) is None:
            self.parked.pop(user, None)

    @rule(count=st.integers(1, 6), data=st.data())
    def take(self, count: int, data: st.DataObject) -> None:
        """Look at some lines in turn, and take their first requests out or leave them."""
        for _ in range(count):
            expected = self.expected()
            line = self.lines.take_turn()
            self.is_under_way = True
            assert (line.user if line else None) is (expected[0] if expected else None)
            if line is None:
                return
            user = line.user
            place, request = self.head(user)
            assert line.head() == (place, request)
            action = data.draw(st.sampled_from(["take", "leave", "park"]))
            if action == "take":
                del self.waiting[request]
                self.lines.discard(request)
                self.out.append((request, user, place))
                self.shares[user] += 1.0
                if self.head(user) is not None:
                    self.lines.give_another_turn(line)
            else:
                self.turn_over.add(user)
                if action == "park":
                    self.parked[user] = self.now_ns + 10
                    self.lines.park(user, self.now_ns + 10)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), comes_back=st.booleans(), keeps_place=st.booleans())
    def give_back(self, data: st.DataObject, comes_back: bool, keeps_place: bool) -> None:
        """A request that was taken out ends, or stands at the head of its line again."""
        request, user, old = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.shares[user] -= 1.0
        if comes_back:
            self.count += 1
            place = old if keeps_place else (old[0], -self.count, "")
            self.waiting[request] = user, place
            line = self.lines.add(user, request, self.waiting[request][1])
            self.lines.end_turn(line)
            self.is_under_way = True
            self.turn_over.add(user)
        else:
            self.next_step(0)  # in the middle of a step nothing ends

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        """A user is looked at again before its instant."""
        user = data.draw(st.sampled_from(sorted(self.parked, key=lambda each: each.account.user)))
        self.lines.unpark(user)
        del self.parked[user]
        self.next_step(0)

    @rule(ns=st.integers(0, 20))
    def next_step(self, ns: int) -> None:
        """A new step begins: everybody has a turn again."""
        self.now_ns += ns
        self.turn_over.clear()
        self.is_under_way = False
        self.parked = {user: at for user, at in self.parked.items() if at > self.now_ns}
        self.lines.begin_step(self.now_ns)

    @rule(most=st.integers(1, 6))
    def look(self, most: int) -> None:
        """To look at the first, in the middle of a step too, changes nothing."""
        if not self.is_under_way:
            heads = [(user, self.head(user)[1]) for user in self.expected()]
            assert self.lines.heads(most) == heads[:most]
        self.lines.heads(most)

    @invariant()
    def books_agree(self) -> None:
        """Whoever waits is there, in order, and nobody else."""
        assert len(self.lines) == len(self.waiting)
        assert list(self.lines) == sorted(self.waiting, key=lambda each: self.waiting[each][1])
        waits = {user for user, _ in self.waiting.values()}
        assert self.lines.has_turns() == bool(waits - self.parked.keys())
        assert self.lines.next_wake_ns() == min(self.parked.values(), default=None)
        assert len(self.lines._in_order) <= 2 * len(waits) + 65


TestAnyOrder = AnyOrder.TestCase
