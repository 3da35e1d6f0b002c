"""Models of other layers than plain attention: windows, latent attention, states, hybrids."""

import pytest
from engine_bed import LAYERS, Bed

RATE = 10
SECONDS = 20
BLOCK_SIZE = 16
BUDGET = 64

by_layers = pytest.mark.parametrize(
    "layers", [each for each in LAYERS if each != "encoder decoder"]
)


@by_layers
@pytest.mark.parametrize("streams", [1, 4])
def test_a_user_gets_its_rate(is_async: bool, layers: str, streams: int) -> None:
    """Whatever the layers a user gets its quota, within the bound of every window."""
    bed = Bed({"a": RATE}, is_async=is_async, layers=layers)
    for _ in range(streams):
        bed.add("a", prompt=100, tokens=10_000)
    bed.add("b", prompt=100, tokens=10_000)
    bed.run(until_ms=SECONDS * 1000)
    assert RATE * SECONDS - 2 <= bed.books.delivered["a"] <= RATE * SECONDS + 2
    bed.check_window_bound()


@by_layers
def test_paused_requests_are_preempted_and_finish(is_async: bool, layers: str) -> None:
    """On a small KV cache everybody finishes, and nothing is left."""
    bed = Bed({"a": 40}, is_async=is_async, layers=layers, num_blocks=60, max_num_seqs=6)
    for index in range(12):
        bed.add("ab"[index % 2], prompt=90 + index, tokens=40)
    bed.run()
    assert len(bed.finished) == 12
    bed.check_empty()


@by_layers
def test_with_limits_far_away_every_step_is_stock(is_async: bool, layers: str) -> None:
    """The same arrivals give the steps of vLLM's own scheduler."""

    def steps(**kwargs: object) -> list[dict[str, int]]:
        bed = Bed(
            is_async=is_async,
            layers=layers,
            num_blocks=80,
            max_num_batched_tokens=BUDGET,
            fairness=False,
            **kwargs,  # type: ignore[arg-type]
        )
        for index in range(12):
            bed.add("abc"[index % 3], prompt=[7] * 40 + [9] * (index * 5), tokens=20 + index)
            bed.step()
        bed.run()
        bed.check_empty()
        return [step.computed for step in bed.steps]

    assert steps(default_rate=1_000_000_000) == steps(paced=False)


def test_chunks_end_where_a_state_is_kept(is_async: bool) -> None:
    """A user at its quota has no chunk that ends between two blocks, but for a prompt's last."""
    bed = Bed({"a": 2}, is_async=is_async, layers="aligned hybrid", max_num_batched_tokens=BUDGET)
    names = [bed.add("a", prompt=150 + 7 * index, tokens=6) for index in range(5)]
    bed.add("b", prompt=10, tokens=300)
    bed.run()
    for name in names:
        computed = 0
        for step in bed.steps_of(name):
            computed += step.computed[name]
            assert name in step.sampled or computed % BLOCK_SIZE == 0
    bed.check_window_bound()


def test_a_prompt_without_its_last_chunk_does_not_keep_the_engine_awake(is_async: bool) -> None:
    """A prompt whose last chunk samples, and may not, is paused: the engine waits for the quota."""
    bed = Bed({"a": 1}, is_async=is_async, layers="aligned hybrid", max_num_batched_tokens=BUDGET)
    for _ in range(3):
        bed.add("a", prompt=150, tokens=3)
    bed.run()
    assert bed.naps < 20
    assert len(bed.steps) < 40


def test_a_window_is_booked_with_what_it_holds() -> None:
    """The blocks of a long context in a window of twenty tokens count once, not for its length."""
    holdings = Bed({"a": 1}, layers="window", max_num_batched_tokens=BUDGET).scheduler._holdings
    assert holdings.blocks(160) - holdings.blocks(144) == 1  # those of the full attention


def test_nobody_gives_way_to_a_prompt_that_waits_for_another(is_async: bool) -> None:
    """A prompt whose cached state is only being written waits a step; paused requests stay."""
    bed = Bed({"a": 0.1}, is_async=is_async, layers="aligned hybrid", max_num_seqs=32)
    for _ in range(10):
        bed.add("a", prompt=20, tokens=50)
    bed.run(until_ms=60_000)
    assert len(bed.scheduler._pauses.requests) > 2
    for _ in range(2):
        bed.add("b", prompt=[7] * 70, tokens=3)
    bed.run(until_ms=61_000)
    assert len(bed.finished) == 2
    assert not bed.laws.preemptions
