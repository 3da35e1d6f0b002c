"""Wake-ups, example by example."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_pacer.wake_ups import WakeUps


class Counted:
    """An item that counts how often any is looked up."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return id(self)


def popped(wake_ups: WakeUps[str], now_ns: int) -> list[str]:
    """Take out all that are due."""
    items = []
    while (wake_up := wake_ups.pop_due(now_ns)) is not None:
        items.append(wake_up.item)
    return items


def test_those_that_are_due_come_in_order() -> None:
    """The earliest first; at the same instant what was set first; the others stay."""
    wake_ups: WakeUps[str] = WakeUps()
    for item, at_ns in (("c", 30), ("b", 20), ("a", 20), ("d", 31)):
        wake_ups.set(item, at_ns)
    assert popped(wake_ups, 30) == ["b", "a", "c"]
    assert len(wake_ups) == 1
    assert wake_ups.next_ns() == 31


def test_the_last_setting_counts() -> None:
    """Set again, earlier or later, an item has one wake-up; dropped, it has none."""
    wake_ups: WakeUps[str] = WakeUps()
    wake_ups.set("a", 10)
    wake_ups.set("a", 30)
    wake_ups.set("b", 30)
    wake_ups.set("b", 20)
    wake_ups.set("c", 5)
    wake_ups.drop("c")
    wake_ups.drop("nobody")
    assert (wake_ups.of("a"), wake_ups.of("b"), wake_ups.of("c")) == (30, 20, None)
    assert "c" not in wake_ups
    assert popped(wake_ups, 100) == ["b", "a"]
    assert wake_ups.next_ns() is None


def test_what_is_put_back_has_its_place_again() -> None:
    """A look at what is due does not change whose turn it is."""
    wake_ups: WakeUps[str] = WakeUps()
    wake_ups.set("a", 10)
    wake_ups.set("b", 10)
    first = wake_ups.pop_due(10)
    assert first is not None
    wake_ups.put_back(first)
    assert popped(wake_ups, 10) == ["a", "b"]


@given(
    settings=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=60),
    dropped=st.sets(st.integers(0, 20)),
    at_ns=st.integers(0, 9),
)
def test_all_that_are_due_are_found_once(
    settings: list[tuple[int, int]], dropped: set[int], at_ns: int
) -> None:
    """Whatever was set before or again, an item is yielded once if its last instant has come."""
    wake_ups: WakeUps[int] = WakeUps()
    for item, due_ns in settings:
        wake_ups.set(item, due_ns)
    for item in dropped:
        wake_ups.drop(item)
    last = dict(settings)
    due = [item for item, due_ns in last.items() if due_ns <= at_ns and item not in dropped]
    assert sorted(wake_ups.due_by(at_ns)) == sorted(due)


def test_who_is_due_later_is_not_looked_at() -> None:
    """One that is due among ten thousand is found with a look at those below it."""
    wake_ups: WakeUps[Counted] = WakeUps()
    for number in range(10_000):
        wake_ups.set(Counted(), 100 + number)
    wake_ups.set(Counted(), 1)
    Counted.looks = 0
    assert len([*wake_ups.due_by(99)]) == 1
    assert Counted.looks <= 5


def test_superseded_wake_ups_do_not_pile_up() -> None:
    """Wake-ups that count no more, however far ahead, leave the memory."""
    wake_ups: WakeUps[int] = WakeUps()
    for number in range(10_000):
        wake_ups.set(number, 10**15 + number)
        wake_ups.drop(number)
        wake_ups.set(-1, 10**16 - number)
    assert len(wake_ups) == 1
    assert len(wake_ups._heap) < 200
