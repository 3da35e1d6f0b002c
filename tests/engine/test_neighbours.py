"""What one user's requests do to another's, beside taking slots and positions."""

import pytest
from engine_bed import NS_PER_MS, Bed
from vllm.v1.request import RequestStatus


def test_stream_of_a_limited_user_keeps_its_rate_beside_long_prompts(is_async: bool) -> None:
    """A decode that goes on after a pause comes before the prefills of a neighbour."""
    bed = Bed({"a": 20}, is_async=is_async, step_ms=40, max_num_batched_tokens=64, max_num_seqs=32)
    stream = bed.add("a", prompt=10, tokens=1500)
    bed.run(until_ms=500)
    before, end_ns = len(bed.answers[stream]), bed.now_ns + 20_000 * NS_PER_MS
    while bed.now_ns < end_ns:
        alive = [each for each in bed.requests if each != stream and each not in bed.finished]
        for _ in range(4 - len(alive)):
            bed.add("b", prompt=1900, tokens=1)
        bed.step()
    assert len(bed.answers[stream]) - before >= 0.99 * 400


@pytest.mark.parametrize("users", ["ab", "a"])
def test_little_is_computed_twice_when_few_requests_fit(users: str, is_async: bool) -> None:
    """With room for two contexts of six, limits cost at most a tenth of the positions more."""
    positions = {}
    for paced in (False, True):
        bed = Bed(
            dict.fromkeys("ab", 10),
            is_async=is_async,
            paced=paced,
            block_size=16,
            num_blocks=41,
            step_ms=20,
            max_num_seqs=16,
            max_num_batched_tokens=256,
        )
        for number in range(6):
            bed.add(users[number % len(users)], prompt=250, tokens=40)
        bed.run(until_ms=60_000)
        assert all(len(answer) == 40 for answer in bed.answers.values())
        positions[paced] = sum(sum(step.computed.values()) for step in bed.steps)
    assert positions[True] <= 1.1 * positions[False]


def test_prompt_that_could_not_fit_displaces_nobody(is_async: bool) -> None:
    """Paused requests keep their blocks if giving them up would not be enough."""
    bed = Bed({"slow": 0.5}, is_async=is_async, num_blocks=40, block_size=16, max_num_seqs=8)
    paused = bed.add("slow", prompt=64, tokens=3)
    other = bed.add("other", prompt=300, tokens=200)
    bed.run(until_ms=300)
    bed.add("quiet", prompt=400, tokens=2)
    bed.run(until_ms=1_500)
    assert bed.requests[other].status == RequestStatus.RUNNING
    assert bed.requests[paused].num_preemptions == 0
