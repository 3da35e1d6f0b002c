"""KV blocks that come from elsewhere: what was loaded waits for quota and blocks nobody."""

import pytest
from engine_bed import Bed

RATE = 10
SECONDS = 20
LOAD_MS = 80

by_mode = pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
"""When a prompt is loaded: before its step, or while the engine goes on."""


@by_mode
@pytest.mark.parametrize("tokens", [16, 40, 60, 1000])
def test_a_user_gets_its_rate(is_async: bool, meanwhile: bool, tokens: int) -> None:
    """Short requests whose prompts are loaded in part or whole: the user gets its quota."""
    bed = Bed({"a": RATE}, is_async=is_async, load_ms=LOAD_MS)
    for _ in range(60):
        bed.add("a", prompt=61, tokens=5, loads=(tokens, meanwhile))
    bed.run(until_ms=SECONDS * 1000)
    assert RATE * SECONDS - 2 <= bed.books.delivered["a"] <= RATE * SECONDS + 2
    bed.check_window_bound()


@by_mode
@pytest.mark.parametrize("fairness", [True, False])
def test_what_is_loaded_waits_without_blocking_others(
    is_async: bool, meanwhile: bool, fairness: bool
) -> None:
    """Requests of which only the sampling position is left let others by until they have quota."""
    bed = Bed({"a": 0.1}, is_async=is_async, load_ms=LOAD_MS, fairness=fairness)
    for _ in range(bed.max_num_seqs + 4):
        bed.add("a", prompt=40, tokens=3, loads=(1000, meanwhile))
    bed.run(until_ms=500)
    others = [bed.add("b", prompt=40, tokens=5, loads=(1000, meanwhile)) for _ in range(5)]
    others += [bed.add("c", prompt=40, tokens=5) for _ in range(5)]
    bed.run(until_ms=2500)
    assert bed.finished.keys() >= set(others)


@by_mode
def test_what_is_loaded_comes_in_beside_a_flood(is_async: bool, meanwhile: bool) -> None:
    """While paused requests fill every position and slot, a loaded one has its turn."""
    bed = Bed(
        {"flood": 1000}, is_async=is_async, load_ms=LOAD_MS, max_num_seqs=16, max_num_active_seqs=2
    )
    for _ in range(20):
        bed.add("flood", tokens=100_000)
        bed.step()
    bed.run(until_ms=2000)
    name = bed.add("b", prompt=40, tokens=5, loads=(1000, meanwhile))
    bed.run(until_ms=4000)
    assert name in bed.finished


@by_mode
def test_with_limits_far_away_every_step_is_stock(is_async: bool, meanwhile: bool) -> None:
    """The same arrivals give the steps of vLLM's own scheduler."""

    def steps(**kwargs: object) -> list[dict[str, int]]:
        bed = Bed(
            is_async=is_async,
            load_ms=LOAD_MS,
            num_blocks=60,
            max_num_active_seqs=4,
            fairness=False,
            **kwargs,  # type: ignore[arg-type]
        )
        for index in range(12):
            loads = (index * 9, meanwhile) if index % 3 else None
            bed.add("abc"[index % 3], prompt=50, tokens=10 + index, loads=loads)
            bed.step()
        bed.run()
        bed.check_empty()
        return [step.computed for step in bed.steps]

    assert steps(default_rate=1_000_000_000) == steps(paced=False)


@by_mode
def test_clients_give_up_while_their_prompts_are_loaded(is_async: bool, meanwhile: bool) -> None:
    """Nothing is left of requests that were aborted at any stage."""
    bed = Bed({"a": 5}, is_async=is_async, load_ms=LOAD_MS)
    names = [
        bed.add("ab"[index % 2], prompt=40, tokens=9, loads=(30, meanwhile)) for index in range(8)
    ]
    for name in names[:6]:
        bed.step()
        bed.abort(name)
    bed.run()
    bed.check_empty()


def test_a_load_that_began_before_a_flood_is_used_in_it(is_async: bool) -> None:
    """Whoever comes meanwhile, a request goes on when it is loaded: vLLM has admitted it."""
    bed = Bed({"flood": 1000}, is_async=is_async, load_ms=300, max_num_active_seqs=2)
    name = bed.add("b", prompt=40, tokens=5, loads=(1000, True))
    bed.step()
    for _ in range(12):
        bed.add("flood", tokens=100_000)
        bed.step()
    bed.run(until_ms=3000)
    assert name in bed.finished
