"""Whose turn it is and when, example by example; `tests/laws` has the state machine."""

from vllm_pacer.fairness import Member
from vllm_pacer.limiter import OutputRateLimiter
from vllm_pacer.pauses import Pauses, User
from vllm_pacer.quota import Quota

MS = 1_000_000
START_NS = 10_000 * MS
ALL = 1000


class Engine:
    """Pauses and their limiter: 10 tokens a second for everybody and a burst for one."""

    def __init__(self, burst_ns: int = 0) -> None:
        quota = Quota.per_second(10, burst_ns)
        self.limiter = OutputRateLimiter(lambda user: quota)
        self.pauses: Pauses[str] = Pauses(self.limiter)
        self.users: dict[str, User[str]] = {}
        self.at(START_NS)

    def at(self, now_ns: int) -> None:
        """Begin a step."""
        self.now_ns = now_ns
        self.step = self.limiter.begin_step(now_ns)

    def user(self, name: str) -> User[str]:
        """Return the user of a name."""
        if name not in self.users:
            self.users[name] = User(self.limiter.account(name), Member(name, 1))
        return self.users[name]

    def spend(self, name: str, tokens: int = 1) -> None:
        """Take tokens."""
        assert self.limiter.take(self.user(name).account, tokens)

    def pause(self, *requests: str, priority: int = 0) -> None:
        """Pause requests until the next token of their user, the first letter of their name."""
        for request in requests:
            user = self.user(request[0])
            wake_ns = self.limiter.account_ready_at_ns(user.account)
            self.pauses.pause(request, user, priority, wake_ns)

    def ready(self) -> int:
        """Count those that may go on."""
        return sum(self.pauses.ready(self.now_ns, ALL).values())

    def resume(self, room: int = ALL) -> list[str]:
        """Take out those that may go on."""
        return self.pauses.resume(self.now_ns, room)


def test_a_users_requests_go_on_in_the_order_they_were_paused() -> None:
    """One token, one request, the one that has waited longest: the quota rotates."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1", "a2", "a3")
    served = []
    for number in range(1, 7):
        engine.at(START_NS + number * 100 * MS)
        [request] = engine.resume()
        served.append(request)
        engine.spend("a")
        engine.pause(request)
    assert served == ["a1", "a2", "a3", "a1", "a2", "a3"]


def test_nobody_goes_on_before_the_next_token() -> None:
    """One nanosecond before its token a request stays paused, and at its instant it goes on."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1")
    assert engine.pauses.next_wake_ns() == START_NS + 100 * MS
    engine.at(START_NS + 100 * MS - 1)
    assert engine.ready() == 0
    assert engine.resume() == []
    engine.at(START_NS + 100 * MS)
    assert engine.ready() == 1
    assert engine.resume() == ["a1"]
    assert engine.pauses.next_wake_ns() is None


def test_as_many_go_on_as_there_are_tokens() -> None:
    """With three tokens of burst three of five requests go on, and the fourth a token later."""
    engine = Engine(burst_ns=200 * MS)
    engine.spend("a", 3)
    engine.pause("a1", "a2", "a3", "a4", "a5")
    engine.at(START_NS + 300 * MS)
    assert engine.ready() == 3
    assert engine.resume() == ["a1", "a2", "a3"]
    assert engine.pauses.next_wake_ns() == START_NS + 400 * MS


def test_the_best_class_goes_first() -> None:
    """Within a user the lowest priority number goes first, whoever has waited longer."""
    engine = Engine(burst_ns=200 * MS)
    engine.spend("a", 3)
    engine.pause("a1", "a2", priority=5)
    engine.pause("a3", "a4", priority=-1)
    engine.at(START_NS + 300 * MS)
    assert engine.resume() == ["a3", "a4", "a1"]
    assert list(engine.pauses.requests) == ["a2"]


def test_no_more_go_on_than_there_is_room_for() -> None:
    """What found no room keeps its place and is due at once."""
    engine = Engine(burst_ns=200 * MS)
    engine.spend("a", 3)
    engine.spend("b", 1)
    engine.pause("a1", "a2", "a3", "b1")
    engine.at(START_NS + 300 * MS)
    assert engine.resume(room=0) == []
    assert engine.resume(room=-1) == []
    first = engine.resume(room=2)
    assert len(first) == 2
    wake_ns = engine.pauses.next_wake_ns()
    assert wake_ns is not None
    assert wake_ns <= engine.now_ns
    assert sorted(first + engine.resume()) == ["a1", "a2", "a3", "b1"]


def test_an_owed_token_is_left() -> None:
    """A token owed to a request outside is not given to a paused one, this once."""
    engine = Engine(burst_ns=100 * MS)
    engine.spend("a", 2)
    engine.pause("a1", "a2", "a3")
    engine.user("a").owed_tokens = 1
    engine.at(START_NS + 200 * MS)
    assert engine.ready() == 1
    assert engine.resume() == ["a1"]
    engine.spend("a", 2)  # by a1 and by the one outside
    engine.at(START_NS + 201 * MS)
    assert engine.resume() == []
    assert engine.pauses.next_wake_ns() == START_NS + 300 * MS
    engine.at(START_NS + 300 * MS)
    assert engine.resume() == ["a2"]


def test_the_only_token_is_owed() -> None:
    """If the only token is owed nobody goes on; if it is not taken, it is for them a step later."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1")
    engine.user("a").owed_tokens = 1
    engine.at(START_NS + 100 * MS)
    assert engine.resume() == []
    engine.at(START_NS + 101 * MS)
    assert engine.resume() == ["a1"]


def test_users_are_woken_in_the_order_of_their_tokens() -> None:
    """Whose token came first goes first; at the same instant, who was paused first."""
    engine = Engine()
    for offset_ms, name in ((0, "c"), (10, "a"), (10, "b")):
        engine.at(START_NS + offset_ms * MS)
        engine.spend(name)
        engine.pause(f"{name}1")
    engine.at(START_NS + 500 * MS)
    assert engine.resume() == ["c1", "a1", "b1"]


def test_a_dropped_request_leaves_the_others_in_order() -> None:
    """Head, middle and last can be dropped, and dropping what is not paused has no effect."""
    for dropped in ("a1", "a2", "a3"):
        engine = Engine(burst_ns=200 * MS)
        engine.spend("a", 3)
        engine.pause("a1", "a2", "a3")
        engine.pauses.drop(dropped)
        engine.pauses.drop(dropped)
        engine.pauses.drop("nobody")
        left = [each for each in ("a1", "a2", "a3") if each != dropped]
        assert list(engine.pauses.requests) == left
        assert len(engine.pauses.requests) == 2
        assert dropped not in engine.pauses.requests
        assert left[0] in engine.pauses.requests
        engine.at(START_NS + 300 * MS)
        assert engine.resume() == left


def test_dropping_the_last_request_ends_the_wait() -> None:
    """A user with nothing paused has no wake-up, and pausing again makes a new one."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1")
    engine.pauses.drop("a1")
    assert engine.pauses.next_wake_ns() is None
    assert not engine.pauses.requests
    engine.pauses.wake_by(engine.user("a"), START_NS)
    assert engine.pauses.next_wake_ns() is None
    engine.pause("a2")
    assert engine.pauses.next_wake_ns() == START_NS + 100 * MS


def test_ready_counts_no_request_twice() -> None:
    """Dropped and paused anew until the same instant, a user is still counted once."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1")
    engine.pauses.drop("a1")
    engine.pause("a2")
    engine.at(START_NS + 100 * MS)
    assert engine.ready() == 1
    assert engine.resume() == ["a2"]


def test_an_earlier_wake_up_supersedes() -> None:
    """After a refund a user is looked at earlier; a later instant never puts it off."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1")
    engine.limiter.refund("a", engine.step, START_NS)
    engine.pauses.wake_by(
        engine.user("a"), engine.limiter.account_ready_at_ns(engine.user("a").account)
    )
    engine.pauses.wake_by(engine.user("a"), START_NS + 900 * MS)
    assert engine.pauses.next_wake_ns() == START_NS
    assert engine.resume() == ["a1"]
    assert engine.pauses.next_wake_ns() is None


def test_a_wake_up_for_nothing_is_put_right() -> None:
    """Woken before its token, a user is looked at again at its token and not in between."""
    engine = Engine()
    engine.spend("a")
    engine.pause("a1")
    engine.pauses.wake_by(engine.user("a"), START_NS + 1)
    engine.at(START_NS + 2)
    assert engine.resume() == []
    assert engine.pauses.next_wake_ns() == START_NS + 100 * MS


def test_wake_ups_before_the_clocks_origin() -> None:
    """In the first 100 ms of a clock a ready instant lies before zero; that is an instant too."""
    engine = Engine(burst_ns=100 * MS)
    pauses, user = engine.pauses, engine.user("a")
    pauses.pause("a1", user, 0, -50)
    pauses.wake_by(user, 10)
    assert pauses.next_wake_ns() == -50
    pauses.wake_by(user, -60)
    assert pauses.next_wake_ns() == -60


def test_iteration_gives_every_paused_request_once() -> None:
    """Iterating gives all paused requests, those of one user and class in turn."""
    engine = Engine()
    for name in "ab":
        engine.spend(name)
    engine.pause("a1", "b1", "a2")
    engine.pause("a0", priority=-1)
    assert sorted(engine.pauses.requests) == ["a0", "a1", "a2", "b1"]
    assert [each for each in engine.pauses.requests if each in ("a1", "a2")] == ["a1", "a2"]
    assert len(engine.pauses.requests) == 4


def test_unlimited_users_go_on_at_once() -> None:
    """A user without a quota is never held back by more than the room."""
    limiter = OutputRateLimiter(lambda user: None)
    pauses: Pauses[str] = Pauses(limiter)
    limiter.begin_step(START_NS)
    user: User[str] = User(limiter.account("a"), Member("a", 1))
    for number in range(5):
        pauses.pause(str(number), user, 0, START_NS)
    assert sum(pauses.ready(START_NS, ALL).values()) == 5
    assert pauses.resume(START_NS, 2) == ["0", "1"]
    assert pauses.resume(START_NS, ALL) == ["2", "3", "4"]


def test_a_thousand_paused_users_cost_no_look_before_their_time() -> None:
    """Asking for the next wake-up looks at no account, however many users are paused."""
    engine = Engine()
    for number in range(1000):
        user: User[str] = User(engine.limiter.account(str(number)), Member(str(number), 1))
        assert engine.limiter.take(user.account)
        engine.pauses.pause(f"r{number}", user, 0, START_NS + 100 * MS)
    engine.at(START_NS + 50 * MS)
    looks = 0

    def count_a_look(account: object) -> int:
        nonlocal looks
        looks += 1
        return 0

    engine.limiter.available = count_a_look  # type: ignore[assignment, method-assign]
    assert engine.resume() == []
    assert engine.ready() == 0
    assert engine.pauses.next_wake_ns() == START_NS + 100 * MS
    assert looks == 0


def test_the_first_paused_requests_are_those_of_the_best_class() -> None:
    """A count of requests falls to the classes in their order."""
    engine = Engine()
    engine.pause("a1", "a2", priority=1)
    engine.pause("a3", priority=0)
    engine.pause("a4", "a5", priority=2)
    assert engine.user("a").first_paused(4) == {0: 1, 1: 2, 2: 1}
    assert engine.user("a").first_paused(0) == {0: 0, 1: 0, 2: 0}
