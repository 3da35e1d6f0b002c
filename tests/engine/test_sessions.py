"""Sessions: requests that go on with another input where they have stopped."""

import pytest
from engine_bed import EOS, Bed
from vllm.v1.request import Request, StreamingUpdate


def test_a_session_is_not_preempted_while_its_turn_may_be_ending(is_async: bool) -> None:
    """It gives way once its output has come, not before: 0.32 would lose it."""
    bed = Bed({"talk": 5}, is_async=is_async, step_ms=20, max_num_seqs=1)
    talk = bed.requests[bed.add("talk", prompt=4, tokens=50, is_session=True)]
    in_flight: list[int] = []
    preempt = bed.scheduler._preempt_request

    def note_and_preempt(request: Request, *args: object, **kwargs: object) -> None:
        in_flight.append(request.num_in_flight_tokens)
        preempt(request, *args, **kwargs)

    bed.scheduler._preempt_request = note_and_preempt
    bed.step()
    assert (talk.num_in_flight_tokens > 0) == is_async
    bed.add("quiet", prompt=4, tokens=5)
    bed.run(until_ms=400)
    assert in_flight == [0]


def test_a_session_gives_way_in_every_turn() -> None:
    """That its tokens are counted anew in each turn does not look as if it stood still."""
    bed = Bed({"talk": 5}, step_ms=20, max_num_seqs=1)
    request = bed.requests[bed.add("talk", prompt=4, tokens=50, is_session=True)]
    bed.run(until_ms=1_000)
    holdings = bed.scheduler._holdings
    assert holdings.victim_for_resident(0) is request
    holdings.preempted(request)
    assert holdings.victim_for_resident(0) is None
    bed.scheduler._update_request_as_session(request, StreamingUpdate.from_request(request))
    assert request.num_output_tokens == 0
    assert holdings.victim_for_resident(0) is None
    request.append_output_token_ids(7)
    assert holdings.victim_for_resident(0) is request


@pytest.mark.parametrize("rate", [1, 5])
def test_a_session_that_leaves_the_queue_and_comes_back_is_limited(rate: int) -> None:
    """0.33 takes a session out and puts it back when an input follows a turn that ended late."""
    bed = Bed({"talk": rate}, step_ms=20, max_num_seqs=1)
    request = bed.requests[bed.add("talk", prompt=4, tokens=10)]
    bed.run(until_ms=300)
    quiet = bed.add("quiet", prompt=4, tokens=5)
    bed.run(until_ms=360)
    waiting, user = bed.scheduler.waiting, bed.scheduler._owner(request)
    assert waiting.is_parked(user)
    assert user not in bed.scheduler._watched
    waiting.remove_requests([request])
    waiting.add_request(request)
    assert user in bed.scheduler._watched
    bed.run()
    assert len(bed.answers[quiet]) == 5
    bed.check_window_bound()


@pytest.mark.parametrize("rate", [None, 20])
def test_a_session_is_answered_turn_by_turn(is_async: bool, rate: int | None) -> None:
    """Each input is answered, whether it comes before the last answer has ended or later."""
    bed = Bed({"talk": rate}, is_async=is_async)
    talk = bed.add("talk", prompt=4, tokens=5, is_session=True)
    bed.say(talk, prompt=3, tokens=6, ends_with=EOS)
    bed.run()
    assert len(bed.answers[talk]) == 11
    bed.say(talk, prompt=2, tokens=7, ends_with=None)
    bed.run()
    assert len(bed.answers[talk]) == 18
    bed.hang_up(talk)
    bed.check_empty()
    bed.check_window_bound()


def test_a_session_that_is_ended_pays_for_what_it_got(is_async: bool) -> None:
    """What is in flight at the end of a turn is dropped, and free, also if the session ends there.

    The bed balances the books.
    """
    bed = Bed({"talk": 100}, is_async=is_async)
    talk = bed.add("talk", prompt=4, tokens=3, ends_with=EOS, is_session=True)
    while talk not in bed.finished:
        bed.step()
    assert bool(bed.in_flight["talk"]) == is_async
    bed.hang_up(talk)
    bed.run()
    assert bed.books.charged("talk") == 3


def test_silent_sessions_take_no_active_positions(is_async: bool) -> None:
    """A user may hold more sessions than may be active: others are computed all the same."""
    bed = Bed(is_async=is_async, max_num_seqs=8, max_num_active_seqs=2)
    for _ in range(4):
        bed.add("talk", prompt=4, tokens=2, is_session=True)
    bed.run(most_steps=100)
    for _ in range(8):
        bed.add("quiet", prompt=4, tokens=5)
    bed.run(most_steps=1_000)
    assert len(bed.finished) == 4 + 8
    assert max(len(step.computed) for step in bed.steps) == 2


def test_a_session_that_waits_for_its_adapter_keeps_its_slot(is_async: bool) -> None:
    """Newcomers do not fill the slots of sessions that have an input and no room for an adapter.

    The bed's worker fails where there are more residents than slots.
    """
    bed = Bed(is_async=is_async, max_num_seqs=8, max_num_active_seqs=6, max_loras=1)
    sessions = [bed.add("talk", tokens=2, adapter=1, is_session=True) for _ in range(2)]
    sessions += [bed.add("talk", tokens=2, is_session=True) for _ in range(3)]
    bed.run(most_steps=200)
    bed.add("other", tokens=30, adapter=2)
    bed.step()
    for each in sessions[:2]:
        bed.say(each, prompt=3, tokens=5, ends_with=None)
    for index in range(4):
        bed.add(f"new-{index}", tokens=10)
    bed.run(most_steps=1_000)
    assert len(bed.finished) == 5 + 1 + 4
