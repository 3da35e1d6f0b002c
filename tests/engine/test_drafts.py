"""Speculative decoding: a step takes quota for its drafts and gives back what is rejected."""

from collections.abc import Callable
from fractions import Fraction

import pytest
from engine_bed import Bed

K = 4
RATE = 20
SECONDS = 20

ACCEPTED: dict[str, Callable[[int], int]] = {
    "none": lambda position: 0,
    "some": lambda position: position % (K + 1),
    "all": lambda position: K,
}
by_acceptance = pytest.mark.parametrize("accepted", ACCEPTED.values(), ids=ACCEPTED.keys())
DRAFTERS = {"ngram": (0, 0), "draft model": (K, 0), "EAGLE": (K, 1), "MTP": (K, K)}
"""How far each looks ahead: in the KV cache, and in a prompt that is not computed to its end."""

by_drafter = pytest.mark.parametrize("looks_ahead", DRAFTERS.values(), ids=DRAFTERS.keys())


def drafting_bed(*args: object, looks_ahead: tuple[int, int] = (0, 0), **kwargs: object) -> Bed:
    """Build an engine that drafts as if with one of the drafters."""
    bed = Bed(*args, drafts=K, **kwargs)  # type: ignore[arg-type]
    bed.scheduler.num_lookahead_tokens, bed.scheduler.num_prefill_lookahead = looks_ahead
    return bed


@by_acceptance
@by_drafter
@pytest.mark.parametrize("streams", [1, 4])
def test_a_user_gets_its_rate(
    is_async: bool, accepted: Callable[[int], int], looks_ahead: tuple[int, int], streams: int
) -> None:
    """With drafts a user gets its quota, within the bound of every window."""
    bed = drafting_bed({"a": RATE}, is_async=is_async, accepted=accepted, looks_ahead=looks_ahead)
    for _ in range(streams):
        bed.add("a", tokens=10_000)
    bed.run(until_ms=SECONDS * 1000)
    delivered = bed.books.delivered["a"]
    most = RATE * (SECONDS + Fraction(1, 10)) + 1
    assert most - 1 - (K + 1) <= delivered <= most
    bed.check_window_bound()


@by_acceptance
def test_rejected_drafts_are_free(is_async: bool, accepted: Callable[[int], int]) -> None:
    """What a user has been charged in the end is what it got, whatever was drafted."""
    bed = drafting_bed({"a": 100, "b": 1_000_000}, is_async=is_async, accepted=accepted)
    for user in "abab":
        bed.add(user, tokens=30)
    bed.run()
    assert bed.books.charged("a") == bed.books.charged("b") == 60
    assert bed.books.given_back["b"] > 0  # at the end of an answer, if not before


@pytest.mark.parametrize("prompt", range(1, 9))
def test_a_paused_request_is_booked_with_what_its_drafts_took(is_async: bool, prompt: int) -> None:
    """The blocks of drafts that were rejected in every step in flight are its own, too."""
    bed = drafting_bed(
        {"b": Fraction(59, 4)},
        weights={"b": 8, "d": Fraction(3, 2)},
        is_async=is_async,
        accepted=lambda position: position % 3,
        max_num_seqs=4,
        max_num_active_seqs=2,
        block_size=4,
        burst_seconds=1,
        step_ms=10,
    )
    for user, tokens in ("d", 3), ("b", 8), ("b", 8):
        bed.add(user, prompt=prompt, tokens=tokens)
    bed.run()  # the bed compares books and blocks after every step
    assert len(bed.finished) == 3


def test_drafts_are_accepted(is_async: bool) -> None:
    """A user whose quota suffices gets several tokens in a step."""
    bed = drafting_bed({"a": 1_000_000}, is_async=is_async, accepted=ACCEPTED["all"])
    name = bed.add("a", tokens=40)
    bed.run()
    assert len([step for step in bed.steps_of(name) if name in step.sampled]) < 20


@pytest.mark.parametrize("rate", [Fraction(1, 2), 1, 5, 15])
def test_a_quota_smaller_than_the_drafts_makes_progress(is_async: bool, rate: Fraction) -> None:
    """Where the quota never holds one token and all drafts, fewer are computed, and no one waits.

    The burst of a tenth of a second holds at most two tokens and a half here.
    """
    bed = drafting_bed({"a": rate}, is_async=is_async, accepted=ACCEPTED["all"])
    for _ in range(3):
        bed.add("a", tokens=8)
    bed.run()
    assert bed.now_ms <= 24 / rate * 1000 + 100
    assert max(most for step in bed.steps for most in step.sampled.values()) <= 2


def test_no_step_takes_more_than_is_there(is_async: bool) -> None:
    """A step computes no more drafts than the user has tokens: two of three, then none."""
    bed = drafting_bed({"a": 20}, is_async=is_async, accepted=ACCEPTED["all"], step_ms=1)
    name = bed.add("a", tokens=50)
    bed.run(until_ms=500)
    assert [step.sampled[name] for step in bed.steps if step.sampled][:4] == [1, 2, 1, 1]


@pytest.mark.parametrize("pause_steps", [1, 2, 50])
@by_acceptance
def test_a_pause_changes_no_token(
    is_async: bool, pause_steps: int, accepted: Callable[[int], int]
) -> None:
    """Drafts that were made before a pause do no harm after it, however long it was.

    The bed compares every answer with what the model says; another user keeps the engine stepping.
    """
    step_ms = 10
    rate = Fraction(1000, step_ms * (pause_steps + 1))
    bed = drafting_bed({"a": rate}, is_async=is_async, accepted=accepted, step_ms=step_ms)
    names = [bed.add("a", tokens=12) for _ in range(2)]
    bed.add("b", tokens=12 * 12 * 2 * (pause_steps + 1) * (K + 1))
    bed.run(until_ms=float(30 * 1000 / rate))
    assert [len(bed.answers[name]) for name in names] == [12, 12]


@by_drafter
def test_a_prompt_stops_before_what_the_drafter_reads(
    is_async: bool, looks_ahead: tuple[int, int]
) -> None:
    """A prompt of a user at its quota waits with as much left to compute as its drafter needs."""
    bed = drafting_bed({"a": Fraction(1, 2)}, is_async=is_async, looks_ahead=looks_ahead)
    bed.add("a", prompt=20, tokens=1)
    name = bed.add("a", prompt=20, tokens=1)
    bed.run()
    chunks = [step.computed[name] for step in bed.steps_of(name)]
    assert chunks == [20 - max(1, looks_ahead[1]), max(1, looks_ahead[1])]


@by_drafter
def test_a_full_cache_hit_is_padded_and_pays_for_one_token(
    is_async: bool, looks_ahead: tuple[int, int]
) -> None:
    """A request of which one token is left to compute comes in with padding, and gets one token."""
    bed = drafting_bed({"a": 10}, is_async=is_async, looks_ahead=looks_ahead)
    prompt = [7] * 33
    bed.add("a", prompt=prompt, tokens=6)
    bed.add("b", prompt=9, tokens=200)
    bed.run(until_ms=1000)
    again = [bed.add("a", prompt=prompt, tokens=6) for _ in range(2)]
    bed.run(until_ms=3000)
    padded = [step for step in bed.steps if any(step.computed.get(each) == 1 + K for each in again)]
    assert padded
    assert all(len(bed.answers[name]) == 6 for name in again)
    bed.check_window_bound()


def test_preempted_drafts_are_given_back(is_async: bool) -> None:
    """Where blocks run out, paused requests give way, and the books stay balanced."""
    bed = drafting_bed(
        {"a": 30, "b": 30}, is_async=is_async, num_blocks=14, max_num_seqs=8, looks_ahead=(K, 0)
    )
    for user in "aaabbb":
        bed.add(user, prompt=20, tokens=25)
    bed.run()
    assert any(step.preempted for step in bed.steps)
    assert all(len(answer) == 25 for answer in bed.answers.values())
    bed.check_window_bound()
    bed.check_empty()


def test_waiting_requests_leave_a_user_its_drafts(is_async: bool) -> None:
    """However many requests of a user wait, those in the step get the drafts that it has quota for.

    Without drafts four streams with steps of 50 ms could not have more than 80 tokens a second.
    """
    bed = drafting_bed(
        {"a": 100}, is_async=is_async, accepted=ACCEPTED["all"], step_ms=50, max_num_seqs=4
    )
    for _ in range(30):
        bed.add("a", tokens=1_000)
    bed.run(until_ms=10_000)
    assert bed.books.delivered["a"] >= 0.98 * 100 * 10
    bed.check_window_bound()


def test_an_idle_user_s_prompt_is_not_held_back(is_async: bool) -> None:
    """A user with fewer tokens than drafts has its prompt computed as soon as without drafts."""

    def first_token_ms(drafts: int) -> float | None:
        bed = Bed({"a": 20}, is_async=is_async, drafts=drafts, max_num_batched_tokens=32)
        bed.add("b", prompt=400, tokens=2)
        name = bed.add("a", prompt=60, tokens=2)
        bed.run()
        return bed.first_token_ms(name)

    assert first_token_ms(K) == first_token_ms(0)
