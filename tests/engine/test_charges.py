"""Charges equal emitted tokens, whatever ends a request or takes its step back.

That charged = emitted + in flight + aborted in flight is checked by the bed after every step of
every test; these tests bring about the cases and pin what each one costs.
"""

import random

import pytest
from engine_bed import EOS, STOP, Bed, sampling_params
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request

FAR_AWAY = 1_000_000


@pytest.mark.parametrize("ends_with", [EOS, STOP])
def test_end_at_first_token_costs_one(is_async: bool, ends_with: int) -> None:
    """An answer of one token costs one; the look-ahead step of async is given back."""
    bed = Bed({"a": FAR_AWAY}, is_async=is_async)
    request = bed.add("a", tokens=1, ends_with=ends_with)
    bed.run()
    assert bed.finished[request] == FinishReason.STOP
    assert bed.books.taken["a"] == (2 if is_async else 1)
    assert bed.books.charged("a") == 1
    bed.check_empty()


def test_max_tokens_costs_nothing_extra(is_async: bool) -> None:
    """An answer cut by max_tokens is never charged for more, even for a moment."""
    bed = Bed({"a": FAR_AWAY}, is_async=is_async)
    request = bed.add("a", tokens=7)
    bed.run()
    assert bed.finished[request] == FinishReason.LENGTH
    assert (bed.books.taken["a"], bed.books.given_back["a"]) == (7, 0)
    bed.check_empty()


def test_refund_wakes_the_paused() -> None:
    """A look-ahead token that is given back goes at once to another stream of the user."""
    bed = Bed({"a": 10}, is_async=True)
    short = bed.add("a", tokens=1, ends_with=EOS)
    bed.add("others", tokens=30)
    bed.run(until_ms=30)
    assert bed.books.taken["a"] == 2  # the answer and its look-ahead: nothing is left until 100 ms
    bed.add("a", tokens=5)
    bed.run(until_ms=95)
    assert short in bed.finished
    assert bed.dispatched_ms("a")[1] < 100


def test_reset_of_running_requests_refunds_what_it_drops(is_async: bool) -> None:
    """Output that a cache reset throws away is not charged; the answer comes in full."""
    bed = Bed({"a": FAR_AWAY, "b": 20}, is_async=is_async)
    requests = [bed.add(user, tokens=12) for user in "aabb"]
    for _ in range(5):
        bed.step()
    in_flight = bed.in_flight
    assert (in_flight["a"] > 0) == is_async
    bed.core.reset_prefix_cache(reset_running_requests=True)
    bed.check()
    bed.run()
    assert all(len(bed.answers[each]) == 12 for each in requests)
    assert bed.books.given_back == in_flight
    bed.check_window_bound()
    bed.check_empty()


def test_preemption_with_a_step_in_flight(is_async: bool) -> None:
    """A request preempted by vLLM itself while its token is computed is charged for it once."""
    bed = Bed(
        {"a": FAR_AWAY}, is_async=is_async, num_blocks=14, block_size=4, max_num_batched_tokens=64
    )
    requests = [bed.add("a", prompt=12, tokens=20) for _ in range(4)]
    bed.run()
    assert sum(len(step.preempted) for step in bed.steps) > 0
    assert all(len(bed.answers[each]) == 20 for each in requests)
    assert bed.books.charged("a") == 80
    bed.check_empty()


def test_abort_while_paused_frees_everything(is_async: bool) -> None:
    """A paused request that is aborted leaves neither slot nor KV nor user behind."""
    bed = Bed({"a": 1}, is_async=is_async)
    paused = bed.add("a", prompt=40, tokens=5)
    bed.run(until_ms=500)
    assert bed.is_paused(paused)
    bed.abort(paused)
    assert bed.residents() == []
    assert not bed.scheduler._users
    assert bed.scheduler.quiet_until_ns() is None
    bed.step()
    assert bed.executor.worker.residents == frozenset()
    bed.run()
    assert bed.books.charged("a") == 1
    bed.check_empty()


def test_abort_while_waiting(is_async: bool) -> None:
    """A request that is aborted in the queue was never charged."""
    bed = Bed({"a": 1}, is_async=is_async, max_num_seqs=1)
    bed.add("b", tokens=20)
    waiting = bed.add("a", prompt=40, tokens=5)
    bed.step()
    bed.abort(waiting)
    bed.run()
    assert bed.books.taken["a"] == 0
    bed.check_empty()


def test_abort_in_flight_keeps_the_charge(is_async: bool) -> None:
    """A client that leaves while its tokens are computed pays for the steps in flight."""
    bed = Bed({"a": FAR_AWAY}, is_async=is_async)
    request = bed.add("a", tokens=50)
    while len(bed.answers[request]) < 5:
        bed.step()
    bed.abort(request, during_step=True)
    bed.run()
    assert bed.books.aborted_in_flight["a"] == (2 if is_async else 1)
    assert bed.books.charged("a") == len(bed.answers[request]) + bed.books.aborted_in_flight["a"]
    bed.check_empty()


def test_abort_after_the_end_keeps_no_look_ahead() -> None:
    """An abort that comes after the answer has ended does not make its look-ahead step final."""
    bed = Bed({"a": FAR_AWAY}, is_async=True)
    request = bed.add("a", tokens=3, ends_with=EOS)
    while request not in bed.finished:
        bed.step()
    assert bed.in_flight["a"] == 1
    bed.abort(request)
    bed.run()
    assert bed.books.charged("a") == 3
    bed.check_empty()


def test_several_answers_cost_their_sum(is_async: bool) -> None:
    """The n answers of one request are charged each, to the one user."""
    params = sampling_params("a", 6, n=3, output_kind=RequestOutputKind.FINAL_ONLY)
    parent = ParentRequest(
        EngineCoreRequest(
            request_id="r",
            external_req_id="r",
            prompt_token_ids=[1, 2, 3],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )
    bed = Bed({"a": 20}, is_async=is_async)
    for index in range(params.n):
        child_id, child_params = parent.get_child_info(index)
        bed.add("a", prompt=[1, 2, 3], tokens=6, request_id=child_id, params=child_params)
    bed.run()
    assert bed.books.charged("a") == 18
    bed.check_window_bound()
    bed.check_empty()


def test_pooling_request_is_nobodys(is_async: bool) -> None:
    """A request that samples nothing is computed without a user and without a charge."""
    bed = Bed(default_rate=1, is_async=is_async)
    for index in range(5):
        pooling = Request(f"pooling-{index}", [1, 2, 3], None, PoolingParams())
        bed.scheduler.add_request(pooling)
    output = bed.scheduler.schedule()
    assert len(output.num_scheduled_tokens) == 5
    assert not bed.books.taken
    assert not bed.scheduler._users


def test_engine_pause_holds_the_quota_too(is_async: bool) -> None:
    """A scheduler that is paused as a whole computes nothing, charges nothing and goes on."""
    bed = Bed({"a": 50}, is_async=is_async)
    request = bed.add("a", tokens=10)
    for _ in range(3):
        bed.step()
    bed.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    bed.run()
    taken = bed.books.taken["a"]
    bed.clock.advance_ns(10**9)
    bed.scheduler.schedule()
    assert bed.books.taken["a"] == taken
    bed.scheduler.set_pause_state(PauseState.UNPAUSED)
    bed.run()
    assert len(bed.answers[request]) == 10
    bed.check_window_bound()


def test_ten_thousand_short_answers() -> None:
    """Over 10,000 answers of 1 to 5 tokens ended by EOS or a stop token, charges are exact."""
    chance = random.Random(1)
    rates = {"a": 200, "b": 2000, "c": None}
    bed = Bed(rates, is_async=True, step_ms=5, max_num_seqs=64, max_num_active_seqs=32)
    left = 10_000
    while left or bed.has_work:
        for _ in range(min(left, 64 - len(bed.scheduler.requests))):
            bed.add(
                chance.choice("abbbccc"),
                prompt=chance.randint(1, 40),
                tokens=chance.randint(1, 5),
                ends_with=chance.choice([EOS, STOP]),
            )
            left -= 1
        bed.run(until_ms=bed.now_ms + 20)
    assert len(bed.finished) == 10_000
    for user in rates:
        assert bed.books.charged(user) == bed.books.delivered[user] > 1000
    ledger = bed.scheduler._ledger
    charged, refunded = ledger.charged_tokens, ledger.refunded_tokens
    emitted = sum(map(len, bed.answers.values()))
    print(f"{charged} charged - {refunded} refunded = {charged - refunded}; {emitted} emitted")
    assert charged - refunded == emitted
    bed.check_window_bound()
    bed.check_empty()


def test_ten_thousand_cancels(is_async: bool) -> None:
    """After 10,000 cancels at random moments nothing of any request is left."""
    chance = random.Random(2)
    rates = {"a": 5, "b": 500, "c": None}
    bed = Bed(
        rates,
        is_async=is_async,
        step_ms=5,
        max_num_seqs=48,
        max_num_active_seqs=16,
        num_blocks=60,
        block_size=4,
        max_num_batched_tokens=64,
    )
    cancels = 0
    while cancels < 10_000:
        while len(bed.scheduler.requests) < 64:
            bed.add(chance.choice("abc"), prompt=chance.randint(1, 40), tokens=100)
        bed.run(until_ms=bed.now_ms + chance.choice([0, 1, 5, 20]))
        live = [*bed.scheduler.requests]
        leaving = chance.sample(live, chance.randint(1, 32))
        bed.abort(*leaving, during_step=chance.random() < 0.5)
        cancels += len(leaving)
        bed.step()
    bed.abort(*bed.scheduler.requests)
    bed.run()
    for user in rates:
        assert bed.books.charged(user) == (
            bed.books.delivered[user] + bed.books.aborted_in_flight[user]
        )
    bed.check_window_bound()
    bed.check_empty()
