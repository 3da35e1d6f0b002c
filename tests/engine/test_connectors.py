"""KV blocks that come from elsewhere: what was loaded waits for quota and blocks nobody."""

import pytest
from engine_bed import EOS, Bed, sampling_params
from vllm.v1.request import Request

RATE = 10
SECONDS = 20
LOAD_MS = 80

by_mode = pytest.mark.parametrize("meanwhile", [False, True], ids=["before", "meanwhile"])
"""When a prompt is loaded: before its step, or while the engine goes on."""


@by_mode
@pytest.mark.parametrize("tokens", [16, 40, 60, 1000])
def test_a_user_gets_its_rate(is_async: bool, meanwhile: bool, tokens: int) -> None:
    """Short requests whose prompts are loaded in part or whole: the user gets its quota."""
    bed = Bed({"a": RATE}, is_async=is_async, load_ms=LOAD_MS)
    for _ in range(60):
        bed.add("a", prompt=61, tokens=5, loads=(tokens, meanwhile))
    bed.run(until_ms=SECONDS * 1000)
    assert RATE * SECONDS - 2 <= bed.books.delivered["a"] <= RATE * SECONDS + 2
    bed.check_window_bound()


@by_mode
@pytest.mark.parametrize("fairness", [True, False])
def test_what_is_loaded_waits_without_blocking_others(
    is_async: bool, meanwhile: bool, fairness: bool
) -> None:
    """Requests of which only the sampling position is left let others by until they have quota."""
    bed = Bed({"a": 0.1}, is_async=is_async, load_ms=LOAD_MS, fairness=fairness)
    for _ in range(bed.max_num_seqs + 4):
        bed.add("a", prompt=40, tokens=3, loads=(1000, meanwhile))
    bed.run(until_ms=500)
    others = [bed.add("b", prompt=40, tokens=5, loads=(1000, meanwhile)) for _ in range(5)]
    others += [bed.add("c", prompt=40, tokens=5) for _ in range(5)]
    bed.run(until_ms=2500)
    assert bed.finished.keys() >= set(others)


@by_mode
def test_what_is_loaded_comes_in_beside_a_flood(is_async: bool, meanwhile: bool) -> None:
    """While paused requests fill every position and slot, a loaded one has its turn."""
    bed = Bed(
        {"flood": 1000}, is_async=is_async, load_ms=LOAD_MS, max_num_seqs=16, max_num_active_seqs=2
    )
    for _ in range(20):
        bed.add("flood", tokens=100_000)
        bed.step()
    bed.run(until_ms=2000)
    name = bed.add("b", prompt=40, tokens=5, loads=(1000, meanwhile))
    bed.run(until_ms=4000)
    assert name in bed.finished


@by_mode
def test_with_limits_far_away_every_step_is_stock(is_async: bool, meanwhile: bool) -> None:
    """The same arrivals give the steps of vLLM's own scheduler."""

    def steps(**kwargs: object) -> list[dict[str, int]]:
        bed = Bed(
            is_async=is_async,
            load_ms=LOAD_MS,
            num_blocks=60,
            max_num_active_seqs=4,
            fairness=False,
            **kwargs,  # type: ignore[arg-type]
        )
        for index in range(12):
            loads = (index * 9, meanwhile) if index % 3 else None
            bed.add("abc"[index % 3], prompt=50, tokens=10 + index, loads=loads)
            bed.step()
        bed.run()
        bed.check_empty()
        return [step.computed for step in bed.steps]

    assert steps(default_rate=1_000_000_000) == steps(paced=False)


@by_mode
def test_clients_give_up_while_their_prompts_are_loaded(is_async: bool, meanwhile: bool) -> None:
    """Nothing is left of requests that were aborted at any stage."""
    bed = Bed({"a": 5}, is_async=is_async, load_ms=LOAD_MS)
    names = [
        bed.add("ab"[index % 2], prompt=40, tokens=9, loads=(30, meanwhile)) for index in range(8)
    ]
    for name in names[:6]:
        bed.step()
        bed.abort(name)
    bed.run()
    bed.check_empty()


def test_a_load_that_began_before_a_flood_is_used_in_it(is_async: bool) -> None:
    """Whoever comes meanwhile, a request goes on when it is loaded: vLLM has admitted it."""
    bed = Bed({"flood": 1000}, is_async=is_async, load_ms=300, max_num_active_seqs=2)
    name = bed.add("b", prompt=40, tokens=5, loads=(1000, True))
    bed.step()
    for _ in range(12):
        bed.add("flood", tokens=100_000)
        bed.step()
    bed.run(until_ms=3000)
    assert name in bed.finished


def waiting_holders(bed: Bed, user: str) -> list[str]:
    """Return the requests of a user that hold KV blocks and are not resident."""
    return [
        each.request_id
        for each in bed.scheduler.requests.values()
        if each.request_id.startswith(user)
        and each.request_id not in bed.residents()
        and bed.blocks(each.request_id)
    ]


@pytest.mark.parametrize("rate", [10, 35])
@pytest.mark.parametrize("fairness", [True, False])
def test_a_user_loads_no_more_than_it_has_tokens_for(
    is_async: bool, rate: int, fairness: bool
) -> None:
    """However many requests wait, those that hold KV blocks and await a token are few."""
    bed = Bed({"a": rate}, is_async=is_async, load_ms=LOAD_MS, fairness=fairness)
    for _ in range(40):
        bed.add("a", prompt=40, tokens=5, loads=(1000, True))
    bed.add("b", tokens=10_000)
    most = 0
    while bed.now_ms < 3000:
        bed.step()
        most = max(most, len(waiting_holders(bed, "a")))
    assert 1 <= most <= rate // 10 + 1  # a burst of 100 ms, and one


def test_what_a_user_loads_does_not_keep_others_out(is_async: bool) -> None:
    """Room for five prompts, forty of them loaded for a user at its quota: another comes in."""
    bed = Bed({"a": 1}, is_async=is_async, load_ms=LOAD_MS, num_blocks=21, max_num_seqs=32)
    for _ in range(40):
        bed.add("a", prompt=60, tokens=5, loads=(1000, True))
    bed.run(until_ms=10_500)
    sent_ms = bed.now_ms
    name = bed.add("b", prompt=60, tokens=5, loads=(1000, True))
    bed.run(until_ms=sent_ms + 1000)
    first_ms = bed.first_token_ms(name)
    assert first_ms is not None
    assert first_ms - sent_ms <= LOAD_MS + 2 * 30


@pytest.mark.parametrize("tokens", [16, 40])
def test_what_failed_to_load_is_computed_when_there_is_quota(is_async: bool, tokens: int) -> None:
    """A prompt whose load failed waits for quota like any other, and blocks nobody."""
    # Whole prompts: one that may be computed in part needs no quota for that.
    bed = Bed({"a": 1}, is_async=is_async, load_ms=LOAD_MS, chunked_prefill=False)
    for _ in range(3):
        bed.add("a", prompt=40, tokens=2, loads=(tokens, True), load_fails=True)
        bed.add("a", prompt=40, tokens=4)
    for until_ms in range(500, 10_000, 500):
        bed.run(until_ms=until_ms)
        name = bed.add("b", prompt=40, tokens=3)
        bed.run(until_ms=until_ms + 300)
        assert name in bed.finished
    bed.run()
    bed.check_empty()
    bed.check_window_bound()


def test_a_prefill_for_another_engine_takes_no_token(is_async: bool) -> None:
    """The engine that delivers the token charges it: this one computes prompts without a limit."""
    bed = Bed({"a": 0.1}, is_async=is_async, load_ms=LOAD_MS, max_num_seqs=8)
    names = [bed.add("a", prompt=40, tokens=1, for_another_engine=True) for _ in range(30)]
    longer = bed.add("a", prompt=40, tokens=3, for_another_engine=True)
    bed.run(until_ms=1000)
    assert bed.finished.keys() >= {*names}
    assert bed.books.taken["a"] == len(bed.answers[longer]) <= 1
    bed.run()
    bed.check_empty()
    assert bed.books.charged("a") == 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_prefill_for_another_engine_shares_positions(is_async: bool, policy: str) -> None:
    """Users with many such prompts take turns with one that has few, and none is lost."""
    bed = Bed(
        {"a": 5},
        is_async=is_async,
        load_ms=LOAD_MS,
        max_num_seqs=8,
        max_num_active_seqs=2,
        max_num_batched_tokens=16,
        policy=policy,
    )
    many = [bed.add("a", prompt=49, tokens=1, for_another_engine=True) for _ in range(30)]
    few = [bed.add("b", prompt=49, tokens=1, for_another_engine=True) for _ in range(2)]
    own = bed.add("a", prompt=9, tokens=4)
    while not bed.finished.keys() >= {*few}:
        bed.step()
    assert len(bed.finished.keys() & {*many}) <= 4
    bed.run()
    assert bed.finished.keys() == {*many, *few, own}
    assert bed.books.charged("a") == 4
    bed.check_empty()


def test_refunds_beside_prefills_for_another_engine(is_async: bool) -> None:
    """A token that nobody pays for does not stand in for one that was charged and did not come."""
    bed = Bed({"a": 1000}, is_async=is_async, load_ms=LOAD_MS)
    for index in range(12):
        bed.add("a", tokens=1 + index % 4, ends_with=EOS)
        bed.add("b", tokens=1, for_another_engine=True)
        bed.step()
    bed.run()
    bed.check_empty()
    assert bed.books.given_back["a"] > 0 or not is_async


def test_a_session_pays_whatever_its_first_turn_says(is_async: bool) -> None:
    """A request that may get further inputs is no prefill for another engine."""
    bed = Bed(is_async=is_async, load_ms=LOAD_MS)
    name = bed.add("a", tokens=1, for_another_engine=True)
    assert bed.requests[name] not in bed.scheduler._payer_of
    session = Request("s", [5, 6], sampling_params("a", 1), None, resumable=True, block_hasher=None)
    session.kv_transfer_params = {"do_remote_decode": True}
    bed.scheduler.add_request(session)
    assert session in bed.scheduler._payer_of


def test_a_connector_that_is_undecided_is_asked_again(is_async: bool) -> None:
    """While all others are paused for long, the engine goes on asking every millisecond."""
    bed = Bed({"a": 0.1}, is_async=is_async, load_ms=LOAD_MS)
    bed.add("a", tokens=5)
    bed.run(until_ms=500)
    name = bed.add("b", tokens=5, undecided=20)
    bed.run(until_ms=700)
    assert name in bed.finished


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_loaded_gets_a_slot_that_was_taken_meanwhile(is_async: bool, fails: bool) -> None:
    """A paused request gives way to one that is loaded, and the engine does not sleep till then."""
    bed = Bed({"a": 0.1}, is_async=is_async, load_ms=LOAD_MS, max_num_seqs=1)
    name = bed.add("b", prompt=40, tokens=5, loads=(1000, True), load_fails=fails)
    bed.step()
    bed.add("a", tokens=50)
    bed.run(until_ms=1000)
    assert name in bed.finished


def test_all_get_a_slot_beside_one_that_is_loaded(is_async: bool) -> None:
    """That a loaded request finds nobody to give way does not end the search for the others."""
    holders = [f"u{number}" for number in range(7)]
    bed = Bed(
        dict.fromkeys(holders, 0.1),
        is_async=is_async,
        load_ms=LOAD_MS,
        max_num_seqs=8,
    )
    bed.add("b", tokens=1000)
    bed.step()
    loaded = bed.add("b", prompt=40, tokens=5, loads=(1000, True))
    bed.step()
    for user in holders:
        bed.add(user, tokens=50)
    bed.run(until_ms=500)
    newcomer = bed.add("c", tokens=5)
    assert not bed.answers[loaded]  # nobody trades places for nothing
    bed.run(until_ms=1500)
    assert newcomer in bed.finished


def test_what_is_loaded_in_part_gets_the_blocks_it_lacks(is_async: bool) -> None:
    """Blocks that a paused request took during the load are given back to the loaded prompt."""
    bed = Bed({"a": 0.1}, is_async=is_async, load_ms=LOAD_MS, num_blocks=31)
    name = bed.add("b", prompt=400, tokens=5, loads=(48, True))
    bed.step()
    bed.add("a", prompt=200, tokens=50)
    later = bed.add("c", prompt=20, tokens=5)
    bed.run(until_ms=1500)
    assert bed.finished.keys() >= {name, later}


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_loaded_gets_a_position_that_was_taken_meanwhile(
    is_async: bool, fails: bool
) -> None:
    """Where two decode without a limit and no third may, a loaded request takes turns with them."""
    bed = Bed(is_async=is_async, load_ms=LOAD_MS, max_num_active_seqs=2)
    name = bed.add("b", prompt=40, tokens=5, loads=(1000, True), load_fails=fails)
    bed.step()
    for user in "cd":
        bed.add(user, tokens=100_000)
    bed.run(until_ms=2000)
    assert name in bed.finished


def test_what_is_loaded_wakes_the_engine_when_it_has_quota(is_async: bool) -> None:
    """In a full house of paused requests the engine does not sleep until their next token."""
    bed = Bed(
        {"a": 0.01, "c": 0.01, "b": 5},
        is_async=is_async,
        load_ms=LOAD_MS,
        burst_seconds=0.4,
        max_num_seqs=2,
    )
    # While its prompt is loaded the user's other request takes all three tokens, and ends.
    bed.add("b", tokens=3)
    loaded = bed.add("b", prompt=40, tokens=2, loads=(1000, True))
    bed.step()
    bed.add("a", tokens=50)
    bed.run(until_ms=89)
    bed.add("c", tokens=50)
    bed.run(until_ms=1500)
    assert loaded in bed.finished


def test_two_loaded_requests_of_one_user_take_turns_with_those_that_paused(is_async: bool) -> None:
    """Whoever has only loaded requests has no slot yet, so somebody without a token gives way."""
    bed = Bed(
        dict.fromkeys("axy", 0.05),
        is_async=is_async,
        load_ms=LOAD_MS,
        burst_seconds=20,
        max_num_seqs=4,
    )
    for _ in range(2):
        bed.add("a", tokens=50)
    bed.run(until_ms=200)
    loaded = [bed.add("b", prompt=40, tokens=5, loads=(1000, True)) for _ in range(2)]
    bed.step()
    for user in "xy":
        bed.add(user, tokens=50)
    bed.run(until_ms=2000)
    assert bed.finished.keys() >= {*loaded}


def test_a_load_gets_room_beside_what_is_reserved(is_async: bool) -> None:
    """Paused requests give way to a load where vLLM keeps free blocks for a prompt in progress."""
    bed = Bed(
        {"a": 0.05, "c": 0.05},
        is_async=is_async,
        load_ms=LOAD_MS,
        burst_seconds=20,
        num_blocks=41,
    )
    bed.add("a", prompt=200, tokens=50)
    bed.run(until_ms=200)
    # A prompt of which a part is loaded, whose user has spent its tokens meanwhile.
    bed.add("c", tokens=3)
    bed.add("c", prompt=300, tokens=3, loads=(16, True))
    bed.run(until_ms=500)
    name = bed.add("d", prompt=160, tokens=3, loads=(1000, True))
    bed.run(until_ms=1500)
    assert name in bed.finished
