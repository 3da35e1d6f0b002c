"""What a neighbour with many streams does to a user with one, where everything is scarce."""

from itertools import pairwise
from typing import Any

import pytest
from engine_bed import EOS, NS_PER_MS, Bed, sampling_params
from vllm.v1.request import Request, RequestStatus


def flooded(streams: int = 64, **kwargs: Any) -> Bed:
    """Thirty-two residents, eight active, and a neighbour at 40 tokens/s with many streams."""
    bed = Bed(
        {"flood": 40},
        step_ms=20,
        **{"max_num_seqs": 32, "max_num_active_seqs": 8, **kwargs},
    )
    for _ in range(streams):
        bed.add("flood", prompt=4, tokens=4000 // streams)
    return bed


def preemptions(bed: Bed) -> int:
    """Return how often a request was preempted."""
    return sum(len(step.preempted) for step in bed.steps)


def test_newcomer_finds_a_slot_in_a_house_full_of_paused_requests(is_async: bool) -> None:
    """When paused requests hold all slots one gives way, and the newcomer is in the next step."""
    bed = flooded(is_async=is_async)
    bed.run(until_ms=3_000)
    assert len(bed.residents()) == 32
    now_ms = bed.now_ms
    quiet = bed.add("quiet", tokens=5)
    bed.step()
    assert bed.first_token_ms(quiet) == now_ms
    assert preemptions(bed) == 1
    bed.run()
    assert len(bed.finished) == 65
    bed.check_window_bound()
    bed.check_empty()


def test_room_is_kept_between_short_requests(is_async: bool) -> None:
    """A user that sends one request after another makes its neighbour give way once, not always."""
    bed = flooded(is_async=is_async)
    bed.run(until_ms=3_000)
    waits = []
    for _ in range(40):
        now_ms = bed.now_ms
        quiet = bed.add("quiet", tokens=5)
        while quiet not in bed.finished:
            bed.step()
        waits.append(bed.first_token_ms(quiet) - now_ms)
        bed.run(until_ms=bed.now_ms + 70)
    assert max(waits) <= 20
    assert preemptions(bed) == 1


def test_neighbour_keeps_its_rate(is_async: bool) -> None:
    """Giving way costs the neighbour none of its tokens per second."""
    bed = flooded(is_async=is_async)
    bed.run(until_ms=5_000)
    before = bed.books.delivered["flood"]
    for _ in range(100):
        bed.add("quiet", tokens=5)
        bed.run(until_ms=bed.now_ms + 200)
    assert bed.books.delivered["flood"] - before == pytest.approx(800, abs=5)


def test_one_user_alone_has_everything() -> None:
    """With one user present nothing is held back: it fills all slots."""
    bed = flooded()
    bed.run(until_ms=3_000)
    assert len(bed.residents()) == 32
    assert preemptions(bed) == 0


@pytest.mark.parametrize("streams", [1, 64, 512])
def test_first_token_does_not_depend_on_the_neighbours_streams(streams: int) -> None:
    """A quiet user waits at most the step in progress, whatever its neighbour has open."""
    bed = flooded(streams)
    bed.run(until_ms=2_000)
    for _ in range(30):
        now_ms = bed.now_ms
        quiet = bed.add("quiet", tokens=3)
        while quiet not in bed.finished:
            bed.step()
        assert bed.first_token_ms(quiet) - now_ms <= 20
        stamps = [step.at_ns for step in bed.steps_of(quiet)]
        assert all(later - earlier == 20 * NS_PER_MS for earlier, later in pairwise(stamps))


def test_weights_divide_the_positions(is_async: bool) -> None:
    """Three users with more to do than there are positions get tokens as 1 : 2 : 4."""
    bed = Bed(
        weights={"two": 2, "four": 4},
        is_async=is_async,
        step_ms=20,
        max_num_seqs=32,
        max_num_active_seqs=8,
    )
    for user in ("one", "two", "four"):
        for _ in range(12):
            bed.add(user, prompt=4, tokens=1000)
    bed.run(until_ms=30_000)
    total = sum(bed.books.delivered.values())
    assert total >= 0.99 * 8 * 1500
    for user, weight in (("one", 1), ("two", 2), ("four", 4)):
        assert bed.books.delivered[user] == pytest.approx(total * weight / 7, rel=0.02)


def test_streams_of_an_unlimited_user_take_turns_beside_others() -> None:
    """Of a user's residents that share its positions none is left behind."""
    bed = Bed(step_ms=20, max_num_seqs=32, max_num_active_seqs=4)
    streams = [bed.add("many", prompt=4, tokens=500) for _ in range(4)]
    bed.run(until_ms=200)
    bed.add("other", prompt=4, tokens=500)
    bed.add("third", prompt=4, tokens=500)
    bed.run(until_ms=4_000)
    counts = [len(bed.answers[each]) for each in streams]
    assert max(counts) - min(counts) <= 5


def test_newcomer_takes_a_position_from_an_unlimited_neighbour(is_async: bool) -> None:
    """When all positions are taken by a user without a limit, a newcomer still starts at once."""
    bed = Bed(is_async=is_async, step_ms=20, max_num_seqs=32, max_num_active_seqs=4)
    for _ in range(40):
        bed.add("many", prompt=4, tokens=400)
    bed.run(until_ms=500)
    now_ms = bed.now_ms
    quiet = bed.add("quiet", tokens=10)
    while quiet not in bed.finished:
        bed.step()
    assert bed.first_token_ms(quiet) - now_ms <= 20
    stamps = [step.at_ns for step in bed.steps_of(quiet)]
    assert max(later - earlier for earlier, later in pairwise(stamps)) == 20 * NS_PER_MS


def test_ten_thousand_waiting_requests_are_not_looked_at(is_async: bool) -> None:
    """A step looks at no waiting request that it cannot admit, however many there are."""
    bed = flooded(streams=100, is_async=is_async)
    for _ in range(10_000):
        bed.add("flood", prompt=1, tokens=1)
    bed.run(until_ms=3_000)
    looks = 0
    scheduler = bed.scheduler
    handle = scheduler._handle_blocked_waiting_request

    def counted(request: Any) -> bool:
        nonlocal looks
        looks += 1
        return handle(request)

    scheduler._handle_blocked_waiting_request = counted
    first = len(bed.steps)
    bed.run(until_ms=4_000)
    assert len(scheduler.waiting) > 9_000
    assert looks <= 3 * (len(bed.steps) - first)


def test_held_requests_are_still_vllms(is_async: bool) -> None:
    """What is held back counts, comes in order of arrival, and can be aborted."""
    bed = flooded(streams=200, is_async=is_async)
    bed.run(until_ms=2_000)
    scheduler = bed.scheduler
    held = [request.request_id for request in scheduler.waiting]
    assert len(held) == len(scheduler.waiting) == 168
    assert scheduler.get_num_unfinished_requests() == 200
    arrivals = [bed.requests[each].arrival_time for each in held]
    assert arrivals == sorted(arrivals)
    bed.abort(*held[:100])
    assert len(scheduler.waiting) == 68
    bed.abort(*[each for each in bed.requests if each not in held[:100]])
    assert len(scheduler.waiting) == 0
    bed.run()
    bed.check_empty()


def test_prompts_of_a_user_at_its_quota_come_one_at_a_time() -> None:
    """Beside others, a flood of long prompts has one chunk in a step, not all of it."""
    bed = Bed({"flood": 40}, step_ms=20, max_num_batched_tokens=256, max_num_seqs=32)
    other = bed.add("other", prompt=4, tokens=600)
    bed.run(until_ms=100)
    flood = [bed.add("flood", prompt=100, tokens=60) for _ in range(64)]
    bed.run(until_ms=10_000)
    for step in bed.steps[10:]:
        assert other in step.computed
        chunks = [each for each in flood if step.computed.get(each, 0) > 1]
        assert len(chunks) <= 1
    assert bed.books.delivered["flood"] >= 390


def test_a_newcomers_prompt_goes_before_a_chunk_of_a_user_at_its_quota() -> None:
    """A quiet user's prompt waits for at most one step with a chunk of its neighbour's prompt."""
    bed = Bed({"flood": 40}, step_ms=20, max_num_batched_tokens=64, max_num_seqs=32)
    for _ in range(64):
        bed.add("flood", prompt=500, tokens=60)
    bed.run(until_ms=2_000)
    for _ in range(20):
        now_ms = bed.now_ms
        quiet = bed.add("quiet", prompt=50, tokens=3)
        while quiet not in bed.finished:
            bed.step()
        assert bed.first_token_ms(quiet) - now_ms <= 20
        bed.run(until_ms=bed.now_ms + 50)


def test_a_prompt_goes_on_beside_a_request_that_cannot_come_in() -> None:
    """A user at its quota misses no step for a request for which there is no slot."""
    bed = Bed({"a": 5}, step_ms=20, max_num_seqs=3, max_num_batched_tokens=34)
    for _ in range(2):
        bed.add("free", prompt=4, tokens=100)
    bed.run(until_ms=100)
    first, _ = [bed.add("a", prompt=400, tokens=5) for _ in range(2)]
    bed.step()
    bed.add("b", prompt=4, tokens=5)
    for _ in range(8):
        before = bed.requests[first].num_computed_tokens
        bed.step()
        assert bed.requests[first].num_computed_tokens > before


def test_little_is_recomputed_and_nobody_gives_way_twice_for_nothing(is_async: bool) -> None:
    """With KV for twenty requests and one of three users flooding, recomputation stays small."""
    bed = Bed(
        {"flood": 100, "b": 100, "c": 100},
        is_async=is_async,
        step_ms=20,
        block_size=16,
        num_blocks=20 * 13 + 1,
        max_num_seqs=64,
        max_num_active_seqs=16,
        max_num_batched_tokens=512,
    )
    for _ in range(60):
        bed.add("flood", prompt=150, tokens=50)
    for _ in range(15):
        for user in "bc":
            bed.add(user, prompt=30, tokens=20)
        bed.run(until_ms=bed.now_ms + 500)
    bed.run()
    delivered = sum(bed.books.delivered.values())
    assert delivered == 60 * 50 + 2 * 15 * 20
    prompts = sum(request.num_prompt_tokens for request in bed.requests.values())
    computed = sum(sum(step.computed.values()) for step in bed.steps)
    needed = prompts + delivered - len(bed.requests)
    look_ahead = len(bed.requests) * is_async  # a step beyond the end may be in flight
    assert computed - needed - look_ahead <= 0.1 * delivered
    bed.check_empty()


def test_better_class_before_smaller_share() -> None:
    """Under the priority policy the class decides, and shares only within it."""
    bed = Bed(step_ms=20, max_num_seqs=4, policy="priority")
    bed.add("first", tokens=10, priority=0)
    bed.run(until_ms=50)
    for user, priority in (("idle", 1), ("first", 0), ("first", 0), ("first", 0)):
        bed.add(user, tokens=10, priority=priority)
    bed.step()
    running = {bed.user_of(each) for each in bed.residents()}
    assert running == {"first"}
    bed.run()
    bed.check_empty()


def test_smaller_share_goes_first_within_a_class() -> None:
    """Of two users that wait for one slot, the one that holds less gets it."""
    bed = Bed(step_ms=20, max_num_seqs=3)
    bed.add("many", tokens=10)
    bed.add("many", tokens=30)
    bed.add("one", tokens=30)
    bed.run(until_ms=50)
    earlier = bed.add("many", tokens=5)
    later = bed.add("new", tokens=5)
    bed.run(until_ms=240)
    assert bed.requests[later].status == RequestStatus.RUNNING or later in bed.finished
    assert bed.requests[earlier].status == RequestStatus.WAITING
    bed.run()
    bed.check_empty()


def test_off_keeps_the_order_of_arrival() -> None:
    """With sharing off a newcomer waits behind what came before it."""
    bed = flooded(fairness=False)
    bed.run(until_ms=3_000)
    quiet = bed.add("quiet", tokens=2)
    bed.run(until_ms=6_000)
    assert bed.requests[quiet].status == RequestStatus.WAITING
    bed.run()
    bed.check_empty()


@pytest.mark.parametrize("fairness", [True, False])
def test_one_user_is_not_held_back_by_what_it_might_ask_for(fairness: bool) -> None:
    """Alone, a user gets its rate, however large the `max_tokens` of its requests."""
    bed = Bed(
        {"a": 1000},
        step_ms=20,
        max_num_seqs=150,
        block_size=16,
        num_blocks=600,
        fairness=fairness,
    )
    params = sampling_params("a", 1900)
    for _ in range(150):
        bed.add("a", prompt=10, tokens=50, ends_with=EOS, params=params)
    bed.run(until_ms=1_000)
    assert bed.books.delivered["a"] >= 980


def test_users_that_may_not_begin_yet_claim_no_slot() -> None:
    """Slots do not stay empty for users whose next token is a long time away."""
    bed = Bed(dict.fromkeys("bcdefgh", 0.01), step_ms=20, max_num_seqs=8)
    for user in "bcdefgh":
        bed.add(user, prompt=1, tokens=1)
    bed.run()
    for user in "bcdefgh":
        bed.add(user, prompt=1, tokens=1)
    for _ in range(8):
        bed.add("a", tokens=100)
    bed.run(until_ms=bed.now_ms + 200)
    assert sum(bed.user_of(each) == "a" for each in bed.residents()) >= 7  # one is kept


def test_prompt_goes_on_beside_one_that_finds_no_room() -> None:
    """A prompt of a user at its quota does not wait for another's that cannot be admitted."""
    bed = Bed(
        {"a": 10, "b": 0.1},
        step_ms=30,
        block_size=16,
        num_blocks=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    bed.add("b", prompt=10, tokens=5)
    bed.add("b", prompt=10, tokens=5)
    bed.run(until_ms=100)
    prompt = bed.add("a", prompt=400, tokens=2)
    bed.add("a", prompt=10, tokens=20)
    bed.run(until_ms=160)
    bed.add("d", prompt=1500, tokens=2)
    bed.run(until_ms=1_500)
    stamps = [step.at_ns for step in bed.steps_of(prompt)]
    assert max(later - earlier for earlier, later in pairwise(stamps[:6])) <= 100 * NS_PER_MS
    assert bed.first_token_ms(prompt) is not None


def test_waiting_requests_that_find_no_blocks_take_no_positions() -> None:
    """Positions are not left empty for prompts that do not fit, though others keep arriving."""
    bed = Bed(step_ms=20, block_size=16, num_blocks=120, max_num_seqs=64, max_num_active_seqs=16)
    for _ in range(15):
        bed.add("a", prompt=64, tokens=30)
    bed.run(until_ms=100)
    for _ in range(5):
        bed.add("b", prompt=1000, tokens=2)
    first = len(bed.steps)
    for _ in range(20):
        bed.add("c", prompt=2, tokens=1)
        bed.step()
    computed = [len(step.computed) for step in bed.steps[first:]]
    assert sum(computed) >= 0.9 * 15 * len(computed)


def test_room_that_grammars_are_compiled_for_is_still_kept() -> None:
    """A request that vLLM skips does not use up what is kept for its user."""
    bed = Bed({"flood": 40}, step_ms=20, max_num_seqs=16, max_num_active_seqs=8)
    bed.add("flood", prompt=4, tokens=200)
    quiet = bed.add("quiet", tokens=2)
    while quiet not in bed.finished:
        bed.step()
    member = bed.scheduler._fair._members["quiet"]
    assert len(member.kept) == 1
    scheduler = bed.scheduler
    handle = scheduler._handle_blocked_waiting_request
    scheduler._handle_blocked_waiting_request = lambda request: False
    bed.add("quiet", tokens=2)
    for _ in range(3):
        bed.step()
    assert len(member.kept) == 1
    scheduler._handle_blocked_waiting_request = handle
    bed.step()
    assert len(member.kept) == 0
    bed.run()
    bed.check_empty()


def test_no_slot_stays_empty_in_an_engine_that_could_compute_in_it() -> None:
    """With as many positions as slots a user takes what others leave at once."""
    bed = Bed(step_ms=20, max_num_seqs=16)
    quiet = bed.add("quiet", tokens=2)
    for _ in range(40):
        bed.add("flood", tokens=20)
    while quiet not in bed.finished:
        bed.step()
    bed.step()
    bed.step()
    assert len(bed.steps[-1].computed) == 16


def test_refund_opens_the_door_to_a_request_that_waits() -> None:
    """A token that comes back is for the user's next request at once, not when it was due."""
    bed = Bed({"a": 10}, is_async=True, step_ms=20, max_num_seqs=4)
    bed.add("b", tokens=50)
    bed.add("a", prompt=4, tokens=1, ends_with=EOS)
    bed.step()
    waiting = bed.add("a", prompt=4, tokens=1)
    bed.run(until_ms=200)
    assert bed.first_token_ms(waiting) < 100


def test_nobody_gives_way_twice_without_a_token_in_between() -> None:
    """The cheapest to compute again is spared if it gave way and has produced nothing since."""
    bed = Bed({"flood": 0.5}, step_ms=20, max_num_seqs=2)
    cheap = bed.add("flood", prompt=4, tokens=9)
    dear = bed.add("flood", prompt=60, tokens=9)
    bed.run(until_ms=200)
    assert bed.is_paused(cheap)
    assert bed.is_paused(dear)
    bed.scheduler._holdings.preempted(bed.requests[cheap])
    bed.add("quiet", tokens=1)
    bed.step()
    assert bed.requests[dear].num_preemptions == 1
    assert bed.requests[cheap].num_preemptions == 0


def test_nine_users_get_in_as_soon_beside_a_flood_as_beside_one_stream() -> None:
    """With more users than positions, those that were given one come in, and not others."""
    waits: dict[int, list[float]] = {}
    for streams in (1, 64):
        bed = Bed(step_ms=16, max_num_seqs=32, max_num_active_seqs=8)
        for _ in range(streams):
            bed.add("flood", prompt=4, tokens=1_000)
        live: dict[str, str] = {}
        due_ms = dict.fromkeys("abcdefghi", 0.0)
        for _ in range(500):
            for user, at_ms in due_ms.items():
                if user not in live and bed.now_ms >= at_ms:
                    live[user] = bed.add(user, prompt=4, tokens=12)
            bed.step()
            for user, request in [*live.items()]:
                if request in bed.finished:
                    del live[user]
                    due_ms[user] = bed.now_ms + 3
        waits[streams] = sorted(
            (bed.first_token_ms(each) - bed.requests[each].arrival_time * 1000) / 16
            for each in bed.requests
            if bed.user_of(each) != "flood" and bed.first_token_ms(each) is not None
        )
    for part in (0.5, 0.95):
        calm, flooded = (each[int(part * len(each))] for each in waits.values())
        assert flooded <= calm + 0.01


class _Grammar:
    """What vLLM looks at while a grammar is compiled; once it is there, it asks for no more."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.is_compiled = False
        request.structured_output_request = self
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    @property
    def grammar(self) -> object:
        if not self.is_compiled:
            return None
        self._request.structured_output_request = None
        return self


def test_request_with_a_grammar_gets_into_a_full_house_once_it_is_compiled() -> None:
    """Nobody gives way before, and one paused request does then."""
    bed = Bed({"flood": 40}, step_ms=20, max_num_seqs=8, max_num_active_seqs=4)
    for _ in range(20):
        bed.add("flood", prompt=4, tokens=200)
    bed.run(until_ms=500)
    with_grammar = bed.add("quiet", prompt=4, tokens=2)
    grammar = _Grammar(bed.requests[with_grammar])
    bed.run(until_ms=1_000)
    assert len(bed.residents()) == 8
    assert sum(each.num_preemptions for each in bed.requests.values()) == 0
    grammar.is_compiled = True
    bed.step()
    bed.step()
    assert bed.answers[with_grammar]


def test_who_left_the_list_in_place_and_came_back_is_there() -> None:
    """vLLM takes a session out of `running` at the end of its turn and appends it in the next."""
    bed = Bed({"slow": 5}, step_ms=20, max_num_seqs=8)
    for _ in range(2):
        bed.add("slow", prompt=4, tokens=20)
    session = bed.add("talk", prompt=4, tokens=50)
    bed.run(until_ms=400)
    scheduler, request = bed.scheduler, bed.requests[session]
    assert len(scheduler._pauses.requests) == 2
    scheduler.running.remove(request)
    update = scheduler._update_after_schedule

    def append_and_update(output: Any) -> None:
        scheduler.running.append(request)
        update(output)

    scheduler._update_after_schedule = append_and_update
    bed.step()
    assert bed.residents().count(session) == 1
