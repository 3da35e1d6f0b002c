"""The lines of those that wait."""

from vllm_pacer.fairness import Member
from vllm_pacer.limiter import Account
from vllm_pacer.lines import Lines
from vllm_pacer.pauses import User


def user(name: str) -> User[str]:
    """Return a user without requests."""
    return User(Account(name, None), Member(name, 1))


def test_a_step_looks_at_no_more_lines_than_it_takes() -> None:
    """Ten thousand users that wait are not asked for their shares in every step."""
    asked: list[User[str]] = []

    def share_of(user: User[str]) -> float:
        asked.append(user)
        return 0.0

    lines = Lines(share_of)
    for number in range(10_000):
        lines.add(user(str(number)), f"request-{number}", (0, number, ""))
    lines.begin_step(0)
    asked.clear()
    for now_ns in range(100):
        lines.begin_step(now_ns)
        assert lines.take_turn() is not None
        assert [request for _, request in lines.heads(2)] == ["request-1", "request-2"]
    assert len(asked) <= 100


def test_who_holds_something_comes_after_who_holds_nothing() -> None:
    """The order is that of shares, and a taken request gives its line a place by its new share."""
    shares = {user("first"): 0.0, user("second"): 0.0}
    first, second = shares
    lines = Lines(shares.__getitem__)
    for number, each in enumerate((first, first, second)):
        lines.add(each, str(number), (0, number, ""))
    lines.begin_step(0)
    taken = []
    while (line := lines.take_turn()) is not None:
        request = line.head()[1]
        taken.append(request)
        lines.discard(request)
        shares[line.user] += 1
        if line:
            lines.give_another_turn(line)
    assert taken == ["0", "2", "1"]


def test_a_request_that_waits_again_takes_its_old_place() -> None:
    """Under the priority policy places recur; a turn of its line of before is not in the way."""
    lines = Lines(lambda user: 0.0)
    one, other, place = user("one"), user("other"), (0, 1.0, "request")
    lines.add(one, "request", place)
    lines.discard("request")
    lines.add(one, "request", place)
    lines.add(other, "later", (0, 2.0, "later"))
    lines.begin_step(0)
    assert [request for _, request in lines.heads(3)] == ["request", "later"]


def test_who_is_parked_in_the_middle_of_a_step_has_no_turn_in_it() -> None:
    """A turn that was put in order before does not outlive the parking, whatever its share."""
    holder, other = user("holder"), user("other")
    shares = dict.fromkeys((holder, other), 1.0)
    lines = Lines(shares.__getitem__)
    for number, each in enumerate((holder, other)):
        lines.add(each, each.account.user, (0, number, ""))
    lines.begin_step(0)
    lines.end_turn(lines.add(other, "came back", (0, -1, "")))  # puts all turns in order
    lines.park(holder, until_ns=100)
    assert lines.take_turn() is None
    assert lines.begin_step(100) == [holder]
    turns = [lines.take_turn(), lines.take_turn()]
    assert {turn.user for turn in turns if turn is not None} == {holder, other}
