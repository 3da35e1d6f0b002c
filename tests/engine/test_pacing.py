"""The quota as the real schedulers keep it: who gets a token when, and what a pause leaves."""

from fractions import Fraction
from itertools import pairwise

import pytest
from engine_bed import Bed, assert_window_bound
from vllm.v1.request import RequestStatus

from vllm_pacer.clock import NS_PER_SECOND

OTHERS = "unlimited"


def test_worked_line(is_async: bool) -> None:
    """Limit 10, four streams, 30 ms steps: tokens leave at 0 (two), 120, 210 and 300 ms."""
    bed = Bed({"a": 10}, is_async=is_async)
    bed.add(OTHERS, tokens=100)
    for _ in range(4):
        bed.add("a", tokens=50)
    bed.run(until_ms=310)
    assert bed.dispatched_ms("a") == [0, 0, 120, 210, 300]


@pytest.mark.parametrize("step_ms", [1, 30, 100])
@pytest.mark.parametrize("keeps_stepping", [False, True], ids=["alone", "beside others"])
def test_rate_is_kept_and_attained(is_async: bool, step_ms: int, keeps_stepping: bool) -> None:
    """With steps no longer than the burst, a backlogged user gets its rate: no less, no more."""
    rates = {"a": 7, "b": 10, "c": 33.3, "d": 60}
    bed = Bed(rates, is_async=is_async, step_ms=step_ms, max_num_seqs=32)
    for user in rates:
        for _ in range(7):
            bed.add(user, tokens=200)
    if keeps_stepping:
        bed.add(OTHERS, prompt=1, tokens=2000)
    seconds = 2
    bed.run(until_ms=1000 * seconds)
    bed.check_window_bound()
    for user, rate in rates.items():
        tokens = len(bed.dispatched_ns(user))
        assert rate * seconds <= tokens <= rate * (seconds + 0.1) + 1


def test_alone_every_token_leaves_at_its_instant(is_async: bool) -> None:
    """When nobody else keeps the engine busy, a paused user goes on at the very nanosecond."""
    bed = Bed({"a": 3}, is_async=is_async, step_ms=10)
    bed.add("a", tokens=10)
    bed.run()
    # Token k is due k/3 s after the first, less the burst, rounded up to a whole nanosecond.
    later = [-(-k * NS_PER_SECOND // 3) - 100_000_000 for k in range(1, 10)]
    assert bed.dispatched_ns("a") == [0, *later]
    bed.check_empty()


def test_unnamed_requests_share_one_quota(is_async: bool) -> None:
    """Requests that name no user are all of one user."""
    bed = Bed({"__anonymous__": 10}, is_async=is_async)
    for _ in range(4):
        bed.add(None, tokens=50)
    bed.run(until_ms=1000)
    assert 10 <= len(bed.dispatched_ns("__anonymous__")) <= 12


def test_paused_request_keeps_everything(is_async: bool) -> None:
    """A paused request keeps its KV blocks and its slot, and goes on with one position."""
    bed = Bed({"a": 2}, is_async=is_async)
    bed.add(OTHERS, tokens=60)
    paused = bed.add("a", prompt=40, tokens=3)
    bed.run(until_ms=200)
    assert bed.is_paused(paused)
    blocks, computed = bed.blocks(paused), bed.requests[paused].num_computed_tokens
    while bed.now_ms < 390:
        assert paused not in bed.step()
        assert bed.is_paused(paused)
        assert bed.blocks(paused) == blocks
        assert bed.requests[paused].num_computed_tokens == computed
        assert paused in bed.executor.worker.residents
    bed.run()
    assert [step.computed[paused] for step in bed.steps_of(paused)] == [40, 1, 1]
    assert bed.requests[paused].num_preemptions == 0
    bed.check_empty()


def test_paused_requests_are_not_active(is_async: bool) -> None:
    """Paused requests leave their places among the active ones to others."""
    bed = Bed({"a": 1}, is_async=is_async, max_num_seqs=8, max_num_active_seqs=2)
    for _ in range(4):
        bed.add("a", tokens=5)
    bed.run(until_ms=150)
    others = [bed.add(OTHERS, tokens=20) for _ in range(2)]
    bed.run(until_ms=300)
    assert {*bed.steps[-1].computed} == {*others}
    assert len(bed.residents()) == 6


def test_residents_reach_the_slots_and_active_ones_their_limit(is_async: bool) -> None:
    """All slots fill with residents while no step computes more than the active limit."""
    users = [f"user-{each}" for each in range(40)]
    bed = Bed(dict.fromkeys(users, 1), is_async=is_async, max_num_seqs=40, max_num_active_seqs=4)
    for user in users:
        bed.add(user, tokens=6)
    bed.run(until_ms=900)
    assert len(bed.residents()) == 40
    assert max(len(step.computed) for step in bed.steps) == 4


def test_dozens_ready_at_once_take_turns(is_async: bool) -> None:
    """Forty users ready at the same instant are served four at a time, each within ten steps."""
    users = [f"user-{each}" for each in range(40)]
    bed = Bed(dict.fromkeys(users, 1), is_async=is_async, max_num_seqs=40, max_num_active_seqs=4)
    for user in users:
        bed.add(user, tokens=6)
    bed.run(until_ms=900)
    bed.clock.advance_ns(2_000_000_000)
    first = len(bed.steps)
    while sum(len(step.computed) for step in bed.steps[first:]) < 40:
        bed.step()
    steps = [step for step in bed.steps[first:] if step.computed]
    assert [len(step.computed) for step in steps] == [4] * 10
    assert len({each for step in steps for each in step.computed}) == 40
    bed.run()
    bed.check_window_bound()
    bed.check_empty()


def test_prefill_over_quota_goes_on_to_its_second_to_last_position(is_async: bool) -> None:
    """Over quota a prompt is computed chunk by chunk but for the position that samples."""
    bed = Bed({"a": 1}, is_async=is_async, max_num_batched_tokens=32)
    bed.add("a", prompt=1, tokens=3)
    prompt = bed.add("a", prompt=100, tokens=2)
    bed.run(until_ms=800)
    assert [step.computed[prompt] for step in bed.steps_of(prompt)] == [31, 32, 32, 4]
    assert bed.requests[prompt].num_computed_tokens == 99
    assert not bed.answers[prompt]
    bed.run()
    assert [step.computed[prompt] for step in bed.steps_of(prompt)] == [31, 32, 32, 4, 1, 1]
    bed.check_window_bound()
    bed.check_empty()


def test_prompt_tokens_cost_nothing(is_async: bool) -> None:
    """A prompt of 500 tokens in chunks costs one token: the one that it samples."""
    bed = Bed({"a": 1}, is_async=is_async, max_num_batched_tokens=64)
    bed.add("a", prompt=500, tokens=1)
    bed.run()
    assert bed.books.taken["a"] == bed.books.delivered["a"] == 1


def test_unchunked_prefill_waits_whole(is_async: bool) -> None:
    """Where a prompt cannot be computed in parts it waits for its token, in the queue."""
    bed = Bed({"a": 1}, is_async=is_async, chunked_prefill=False)
    bed.add("a", prompt=1, tokens=1)
    prompt = bed.add("a", prompt=100, tokens=1)
    bed.run(until_ms=899)
    assert bed.requests[prompt].status == RequestStatus.WAITING
    assert not bed.steps_of(prompt)
    bed.run()
    (step,) = bed.steps_of(prompt)
    assert (step.at_ns, step.computed[prompt]) == (900_000_000, 100)
    bed.check_empty()


def test_quota_rotates_between_streams(is_async: bool) -> None:
    """The streams of one user take turns."""
    bed = Bed({"a": 10}, is_async=is_async)
    bed.add(OTHERS, tokens=200)
    streams = {bed.add("a", tokens=30) for _ in range(4)}
    bed.run(until_ms=4000)
    served = [each for step in bed.steps for each in step.sampled if each in streams]
    assert len(served) >= 40
    for first in range(len(served) - 3):
        assert {*served[first : first + 4]} == streams


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_better_priority_class_first(is_async: bool, policy: str) -> None:
    """Under the priority policy a user's better class takes all of its quota, in rotation."""
    bed = Bed({"a": 10}, is_async=is_async, policy=policy)
    bed.add(OTHERS, tokens=200)
    worse = {bed.add("a", tokens=10, priority=1) for _ in range(2)}
    better = {bed.add("a", tokens=10, priority=0) for _ in range(2)}
    bed.run(until_ms=1900)
    served = [each for step in bed.steps for each in step.sampled if each in worse | better]
    assert len(served) == 20
    if policy == "fcfs":
        assert all({*served[i : i + 4]} == worse | better for i in range(17))
    else:
        assert {*served} == better
        assert all(one != two for one, two in pairwise(served))
        bed.run()
        assert all(len(bed.answers[each]) == 10 for each in worse)


WAITING_PROMPTS = {
    "one-token prompt": {"prompt": [11]},
    "full prefix hit": {"prompt": [*range(100, 133)]},
    "unchunked": {"prompt": [*range(200, 250)]},
}


@pytest.mark.parametrize("kind", WAITING_PROMPTS)
def test_waiting_request_without_quota_blocks_nobody(is_async: bool, kind: str) -> None:
    """A waiting request that cannot even begin lets those behind it pass in the same step."""
    bed = Bed({"a": 1}, is_async=is_async, chunked_prefill=kind != "unchunked")
    if kind == "full prefix hit":
        bed.add("warm", tokens=1, **WAITING_PROMPTS[kind])
        bed.run()
    bed.add("a", prompt=1, tokens=1)
    bed.run()
    now_ms = bed.now_ms
    waiting = bed.add("a", tokens=1, **WAITING_PROMPTS[kind])
    behind = bed.add("b", tokens=1)
    bed.step()
    assert bed.first_token_ms(behind) == now_ms
    assert bed.requests[waiting].status == RequestStatus.WAITING
    bed.run()
    assert bed.finished.keys() >= {waiting, behind}
    bed.check_window_bound()
    bed.check_empty()


@pytest.mark.parametrize("kind", WAITING_PROMPTS)
def test_waiting_request_gets_its_turn_beside_resident_streams(is_async: bool, kind: str) -> None:
    """A waiting request gets its token before each resident stream of its user got two more."""
    bed = Bed({"a": 10}, is_async=is_async, chunked_prefill=kind != "unchunked")
    bed.add("a", tokens=1, **WAITING_PROMPTS[kind])
    for _ in range(4):
        bed.add("a", prompt=1, tokens=100)
    bed.run(until_ms=2000)
    waiting = bed.add("a", tokens=1, **WAITING_PROMPTS[kind])
    bed.run(until_ms=2900)
    assert waiting in bed.finished


def test_limited_user_does_not_slow_others(is_async: bool) -> None:
    """A stream beside sixty-four over-quota streams gets a token in every step, as if alone."""
    bed = Bed({"a": 5}, is_async=is_async, max_num_seqs=72, max_num_active_seqs=8)
    for _ in range(64):
        bed.add("a", prompt=1, tokens=20)
    bed.run(until_ms=300)
    other = bed.add("b", tokens=50)
    bed.run(until_ms=bed.now_ms + 49 * 30)
    stamps = [step.at_ns for step in bed.steps if other in step.sampled]
    assert len(stamps) >= 49
    gaps = {later - earlier for earlier, later in pairwise(stamps)}
    assert max(gaps) <= 30_000_000


@pytest.mark.parametrize("streams", [8, 20])
def test_slow_steps_reach_the_rate(is_async: bool, streams: int) -> None:
    """With steps of 400 ms, four times the burst, a user with enough streams gets its rate.

    No window holds more than the bound allows with a burst of one step's time.
    """
    bed = Bed({"a": 20}, is_async=is_async, step_ms=400, max_num_seqs=32)
    for _ in range(streams):
        bed.add("a", tokens=1_000)
    bed.run(until_ms=4_000)
    before = bed.books.delivered["a"]
    bed.run(until_ms=44_000)
    assert bed.books.delivered["a"] - before >= 0.98 * 20 * 40
    assert bed.longest_burst_ns == 400_000_000
    bed.check_window_bound()


def test_one_long_step_does_not_lengthen_the_burst(is_async: bool) -> None:
    """A machine that stands still for a second now and then gives nobody more at once."""
    bed = Bed({"a": 20}, is_async=is_async, step_ms=10)
    for _ in range(8):
        bed.add("a", tokens=100)
    for _ in range(10):
        bed.run(until_ms=bed.now_ms + 1_000)
        bed.clock.advance_ns(1_000_000_000)
    assert bed.longest_burst_ns == 0
    bed.check_window_bound()


def test_the_burst_is_as_before_when_steps_are_fast_again(is_async: bool) -> None:
    """One step within the burst, and users are held to it again."""
    bed = Bed({"a": 20}, is_async=is_async, step_ms=400, max_num_seqs=32)
    for _ in range(20):
        bed.add("a", tokens=1_000)
    bed.run(until_ms=8_000)
    bed.executor.step_ns = 10_000_000
    bed.run(until_ms=9_000)
    start = bed.now_ns
    bed.run(until_ms=19_000)
    later = [stamp for stamp in bed.dispatched_ns("a") if stamp >= start]
    assert_window_bound(later, Fraction(20), 100_000_000)


@pytest.mark.parametrize("burst_seconds", [0, 0.005])
def test_a_short_burst_is_kept(is_async: bool, burst_seconds: float) -> None:
    """Steps that are longer than a short burst, but not slow, leave it as it was chosen."""
    bed = Bed({"a": 100}, is_async=is_async, burst_seconds=burst_seconds, step_ms=100)
    for _ in range(8):
        bed.add("a", tokens=50)
    bed.run(until_ms=3_000)
    assert bed.longest_burst_ns == 0
    bed.check_window_bound()


def test_the_time_between_two_calls_is_no_step() -> None:
    """An offline engine that is not stepped between two calls has no slow steps."""
    bed = Bed({"a": 20})
    for _ in range(8):
        name = bed.add("a", tokens=1)
        while name not in bed.finished:
            bed.step()
        bed.clock.advance_ns(10_000_000_000)
    assert bed.longest_burst_ns == 0
