"""Pipeline parallelism: several steps in flight, each for other requests."""

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from engine_bed import Bed
from test_drafts import K, by_acceptance, by_drafter, drafting_bed
from vllm.v1.core.sched.interface import PauseState

SECONDS = 20
by_depth = pytest.mark.parametrize("pipeline", [2, 4])


@by_depth
@pytest.mark.parametrize("streams", [1, 4, 8])
def test_a_user_gets_its_rate(pipeline: int, streams: int) -> None:
    """With several steps in flight a user gets its quota, within the bound of every window."""
    bed = Bed({"a": 20}, pipeline=pipeline)
    for _ in range(streams):
        bed.add("a", tokens=10_000)
    bed.run(until_ms=SECONDS * 1000)
    delivered = bed.books.delivered["a"]
    most = 20 * (SECONDS + Fraction(1, 10)) + 1
    assert most - 3 <= delivered <= most
    bed.check_window_bound()


@by_depth
@by_acceptance
@by_drafter
def test_a_user_that_drafts_gets_its_rate(
    pipeline: int, accepted: Callable[[int], int], looks_ahead: tuple[int, int]
) -> None:
    """With drafts in several steps in flight, too: what is rejected is free."""
    bed = drafting_bed(
        {"a": 20}, is_async=True, pipeline=pipeline, accepted=accepted, looks_ahead=looks_ahead
    )
    for _ in range(4):
        bed.add("a", tokens=10_000)
    bed.run(until_ms=SECONDS * 1000)
    delivered = bed.books.delivered["a"]
    most = 20 * (SECONDS + Fraction(1, 10)) + 1
    assert most - 1 - (K + 1) <= delivered <= most
    bed.check_window_bound()


def test_a_synchronous_pipeline_is_no_place_for_drafts() -> None:
    """Why it is refused: vLLM's own scheduler computes drafts before the token that they follow."""
    bed = Bed(paced=False, pipeline=2, drafts=K)
    name = bed.add("a", prompt=10, tokens=20)
    bed.step()
    bed.step()
    prompt, drafts, *_ = bed.steps
    assert (prompt.computed, drafts.computed) == ({name: 10}, {name: K})
    assert bed.now_ms == 30
    assert drafts.at_ns == prompt.at_ns  # so nothing of the prompt's step was known


@by_depth
def test_no_request_is_in_two_steps_at_once(pipeline: int) -> None:
    """A request in flight takes no second token, whoever pauses and goes on meanwhile."""
    bed = Bed({"a": 40, "b": 1_000_000}, pipeline=pipeline, max_num_active_seqs=4)
    for user in "aaabbb":
        bed.add(user, tokens=100)
    bed.run()
    for request_id in bed.answers:
        starts = [step.at_ns for step in bed.steps if request_id in step.sampled]
        assert len(starts) == 100
        assert all(b - a >= 30_000_000 for a, b in pairwise(starts))


def test_the_engine_does_not_sleep_on_a_request_that_is_due_a_step_later() -> None:
    """vLLM lets steps go by between two of a request; an empty one is no reason to wait."""
    # A second prompt waits for blocks, and room is kept: so there is an instant to wait for.
    bed = Bed(
        is_async=True,
        pipeline=2,
        step_ms=10,
        num_blocks=16,
        block_size=4,
        max_num_active_seqs=8,
        max_num_batched_tokens=2048,
        chunked_prefill=False,
    )
    bed.add("d", prompt=26, tokens=4)
    bed.add("d", prompt=26, tokens=4)
    bed.add("a", prompt=1, tokens=1)
    for ms in (1, 1, 2):
        bed.run(until_ms=bed.now_ms + ms)
    for state in PauseState.PAUSED_ALL, PauseState.UNPAUSED:
        bed.scheduler.set_pause_state(state)
        bed.run(until_ms=bed.now_ms + 1)
    assert bed.residents() == ["d-0"]
    bed.run()
    assert bed.now_ms < 200


@by_depth
def test_the_pipeline_is_kept_full(pipeline: int) -> None:
    """Users with as many streams as there are stages compute in all of them, limited or not."""
    bed = Bed({"a": 1_000_000}, pipeline=pipeline, max_num_active_seqs=1, max_num_seqs=8)
    for _ in range(pipeline):
        bed.add("a", tokens=50)
    stock = Bed(pipeline=pipeline, max_num_active_seqs=1, max_num_seqs=8, paced=False)
    for _ in range(pipeline):
        stock.add("a", tokens=50)
    bed.run()
    stock.run()
    assert bed.now_ns == stock.now_ns
