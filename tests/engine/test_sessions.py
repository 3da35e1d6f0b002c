"""Sessions: requests that go on with another input where they have stopped."""

import pytest
from engine_bed import Bed
from vllm.v1.request import Request, StreamingUpdate


def session(bed: Bed, user: str, tokens: int) -> Request:
    """Add a request that may get further inputs."""
    request = bed.requests[bed.add(user, prompt=4, tokens=tokens)]
    request.resumable = True
    return request


def test_a_session_is_not_preempted_while_its_turn_may_be_ending(is_async: bool) -> None:
    """It gives way once its output has come, not before: 0.32 would lose it."""
    bed = Bed({"talk": 5}, is_async=is_async, step_ms=20, max_num_seqs=1)
    talk = session(bed, "talk", tokens=50)
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
    request = session(bed, "talk", tokens=50)
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
