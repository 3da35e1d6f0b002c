"""Adapters take turns when there are more than fit into a step."""

from hypothesis import example, given
from hypothesis import strategies as st

from vllm_pacer.adapters import AdapterTurns


@given(
    slots=st.integers(1, 4), steps=st.lists(st.lists(st.integers(1, 6), max_size=8), max_size=30)
)
def test_no_slot_stays_empty_and_none_is_given_twice(slots: int, steps: list[list[int]]) -> None:
    """In every step as many adapters are chosen as fit, all of them wanted."""
    turns = AdapterTurns(slots)
    for wanted in steps:
        chosen = turns.choose(wanted)
        assert chosen <= set(wanted)
        assert len(chosen) == min(slots, len(set(wanted)))


@given(slots=st.integers(1, 4), adapters=st.integers(1, 8), steps=st.integers(1, 50))
def test_everybody_has_an_equal_number_of_turns(slots: int, adapters: int, steps: int) -> None:
    """Adapters that all go on wanting a slot differ by one turn at most."""
    turns = AdapterTurns(slots)
    chosen = [turns.choose(range(adapters)) for _ in range(steps)]
    counts = [sum(adapter in each for each in chosen) for adapter in range(adapters)]
    assert max(counts) - min(counts) <= 1


@example(slots=1, steps=[{1}, {2}] * 10)
@given(slots=st.integers(1, 3), steps=st.lists(st.sets(st.integers(1, 6)), max_size=40))
def test_nobody_is_left_out_for_long(slots: int, steps: list[set[int]]) -> None:
    """Who wants a slot in every step waits no longer than the others take, one turn each."""
    turns = AdapterTurns(slots)
    waited = 0
    for wanted in steps:
        waited = 0 if 0 in turns.choose([*wanted, 0]) else waited + 1
        assert waited <= -(-6 // slots)


def test_who_misses_every_other_step_has_turns() -> None:
    """An adapter whose only request is held back in every other step is chosen in the rest."""
    turns = AdapterTurns(1)
    chosen = [turns.choose([1, 2, 3] if step % 2 else [1, 3]) for step in range(12)]
    assert {2} in chosen[:6]
    assert chosen.count({2}) >= 3


def test_who_comes_after_a_calm_comes_first() -> None:
    """Where there was a slot for all, none is owed a turn: those named first have it."""
    turns = AdapterTurns(1)
    assert turns.choose([1, 2]) == {1}
    assert turns.choose([2]) == turns.choose([2]) == {2}
    assert turns.choose([3, 2]) == {3}
