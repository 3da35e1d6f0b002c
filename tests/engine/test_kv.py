"""Who gives way when KV blocks run out. Blocks hold four tokens here."""

from typing import Any

import pytest
from engine_bed import Bed
from vllm.v1.request import RequestStatus


def small_bed(rates: dict[str, int | float | None], blocks: int, **kwargs: Any) -> Bed:
    """A bed with that many usable blocks; vLLM keeps one for itself."""
    return Bed(rates, block_size=4, num_blocks=blocks + 1, **kwargs)


def preempted(bed: Bed) -> list[str]:
    """Return the requests that were preempted, in order."""
    return [each for step in bed.steps for each in step.preempted]


def test_paused_gives_way_to_running(is_async: bool) -> None:
    """When a visible request needs a block, the paused one is preempted and no other."""
    bed = small_bed({"a": 1}, blocks=20, is_async=is_async)
    paused = bed.add("a", prompt=28, tokens=3)
    others = [bed.add("b", prompt=8, tokens=20) for _ in range(2)]
    bed.run(until_ms=700)
    assert preempted(bed) == [paused]
    assert all(each in bed.finished for each in others)
    bed.run()
    assert preempted(bed) == [paused]
    assert len(bed.answers[paused]) == 3
    bed.check_window_bound()
    bed.check_empty()


@pytest.mark.parametrize("greater", ["a", "z"])
def test_greatest_share_gives_way_first(is_async: bool, greater: str) -> None:
    """Of several users' paused requests one of the user that holds most is preempted."""
    bed = small_bed({"a": 0.1, "z": 0.1}, blocks=22, is_async=is_async)
    paused = {user: bed.add(user, prompt=28 if user == greater else 20, tokens=2) for user in "az"}
    bed.add("b", prompt=16, tokens=40)
    bed.run(until_ms=850)
    assert preempted(bed) == [paused[greater]]


def test_cheapest_gives_way_first(is_async: bool) -> None:
    """Of one user's paused requests the one that is cheapest to compute again is preempted."""
    bed = small_bed({"a": 0.1}, blocks=22, is_async=is_async)
    cheap, _ = (bed.add("a", prompt=prompt, tokens=2) for prompt in (20, 28))
    bed.run(until_ms=60)
    bed.add("b", prompt=16, tokens=40)
    bed.run(until_ms=850)
    assert preempted(bed) == [cheap]


def test_waiting_request_with_quota_makes_a_paused_one_give_way(is_async: bool) -> None:
    """A newcomer with quota is admitted in the next step though paused requests hold all KV."""
    bed = small_bed({"a": 1}, blocks=16, is_async=is_async)
    paused = [bed.add("a", prompt=16, tokens=3) for _ in range(4)]
    bed.run(until_ms=300)
    assert len(bed.scheduler._pauses.requests) >= 3
    bed.run(until_ms=500)
    newcomer = bed.add("b", prompt=12, tokens=5)
    bed.step()
    assert bed.first_token_ms(newcomer) == 500
    bed.run()
    assert {*preempted(bed)} <= {*paused}
    assert all(len(bed.answers[each]) == 3 for each in paused)
    bed.check_window_bound()
    bed.check_empty()


def test_waiting_request_without_quota_displaces_nobody(is_async: bool) -> None:
    """A newcomer that would only be paused in the other's place does not make it give way."""
    bed = small_bed({"a": 1, "b": 0.5}, blocks=16, is_async=is_async)
    bed.add("b", prompt=[1], tokens=1)
    bed.run()
    holders = [bed.add("a", prompt=16, tokens=2) for _ in range(3)]
    bed.run(until_ms=500)
    assert len(bed.residents()) == 3
    bed.add("b", prompt=24, tokens=1)
    bed.run(until_ms=800)
    assert preempted(bed) == []
    assert {*bed.residents()} == {*holders}
    bed.run()
    bed.check_window_bound()
    bed.check_empty()


@pytest.mark.parametrize("paused_priority", [0, 1, 2])
def test_only_within_its_priority(is_async: bool, paused_priority: int) -> None:
    """Under the priority policy a paused request never gives way to a worse class."""
    bed = small_bed({"a": 1}, blocks=14, is_async=is_async, policy="priority")
    paused = bed.add("a", prompt=28, tokens=3, priority=paused_priority)
    bed.run(until_ms=200)
    other = bed.add("b", prompt=20, tokens=30, priority=1)
    bed.run(until_ms=700)
    if paused_priority == 0:
        assert {*preempted(bed)} == {other}
    else:
        assert {*preempted(bed)} == {paused}
    bed.run()
    bed.check_empty()


@pytest.mark.parametrize("paused_priority", [0, 1])
def test_waiting_request_displaces_only_its_priority(is_async: bool, paused_priority: int) -> None:
    """Under the priority policy a newcomer waits for a paused request of a better class."""
    bed = small_bed({"a": 1}, blocks=16, is_async=is_async, policy="priority")
    paused = bed.add("a", prompt=56, tokens=2, priority=paused_priority)
    bed.run(until_ms=200)
    assert bed.is_paused(paused)
    newcomer = bed.add("b", prompt=40, tokens=5, priority=1)
    bed.step()
    is_admitted = bed.requests[newcomer].status == RequestStatus.RUNNING
    assert is_admitted == (paused_priority == 1)
    bed.run()
    bed.check_empty()


def test_victim_is_not_admitted_again_in_the_same_step(is_async: bool) -> None:
    """No step computes a request that it preempted, and recomputation stays the exception."""
    bed = small_bed({"a": 20, "b": 40}, blocks=30, is_async=is_async, max_num_batched_tokens=64)
    for user in "abcabcabc":
        bed.add(user, prompt=20, tokens=20)
    bed.run()
    assert preempted(bed)
    assert all(not step.preempted & step.computed.keys() for step in bed.steps)
    assert all(len(answer) == 20 for answer in bed.answers.values())
    bed.check_window_bound()
    bed.check_empty()


def test_preempted_paused_request_goes_on_from_its_history(is_async: bool) -> None:
    """A paused request that gave way recomputes prompt and answer, and costs nothing twice."""
    bed = small_bed({"a": 2}, blocks=20, is_async=is_async)
    paused = bed.add("a", prompt=24, tokens=6)
    bed.run(until_ms=1100)
    assert len(bed.answers[paused]) == 3
    bed.add("b", prompt=40, tokens=20)
    bed.run()
    assert preempted(bed) == [paused]
    assert len(bed.answers[paused]) == 6
    assert bed.books.charged("a") == 6
    bed.check_window_bound()
    bed.check_empty()
