"""Wake-ups, example by example."""

from vllm_pacer.wake_ups import WakeUps


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


def test_superseded_wake_ups_do_not_pile_up() -> None:
    """Wake-ups that count no more, however far ahead, leave the memory."""
    wake_ups: WakeUps[int] = WakeUps()
    for number in range(10_000):
        wake_ups.set(number, 10**15 + number)
        wake_ups.drop(number)
        wake_ups.set(-1, 10**16 - number)
    assert len(wake_ups) == 1
    assert len(wake_ups._heap) < 200
