"""The laws under random histories of the real engine core.

`Bed.check` compares its books with the scheduler's after every step; the machine adds what holds
over a whole history: the window bound, and that everybody is served in the end.

How soon is a law too, `Drain.longest_ns`. Once nobody arrives any more, a user has its last token
after no more than

* the time until the last grammar is compiled,
* the time in which all prompts that come from elsewhere are loaded, one after another,
* the time that its own quota takes for the tokens that it lacks,
* the steps of everybody's work, or fewer where its weight gives it positions in them, and
* the time that the quotas of others take, where it may have to wait for what they hold: with
  sharing off, behind better priority classes, and where room is too scarce to be shared.
"""

import os
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from engine_bed import EOS, LAYERS, NS_PER_MS, STOP, Bed, layer_groups
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason

from vllm_pacer.clock import NS_PER_SECOND

USERS = "abcd"
PREFIX = [7] * 16
DECODERS = [each for each in LAYERS if each != "encoder decoder"]
MOST_PROMPT = 30
MOST_TOKENS = 12
MOST_CONTEXT = len(PREFIX) + MOST_PROMPT + MOST_TOKENS
MOST_TURNS = 3
# All turns of a session together are not longer than another request.
TURN = {
    "prompt": st.integers(1, 10),
    "tokens": st.integers(1, 4),
    "ends_with": st.sampled_from([None, EOS, STOP]),
}
BLOCK_SIZE = 4
MOST_BLOCKS = -(-MOST_CONTEXT // BLOCK_SIZE)
MOST_ACTIVE = 8
EXAMPLES = int(os.environ.get("PACER_ENGINE_EXAMPLES", "100"))

rates = st.none() | st.fractions(Fraction(1, 4), 200, max_denominator=12)
weights = st.sampled_from([Fraction(1), Fraction(2), Fraction(8), Fraction(1, 4), Fraction(3, 2)])


class Drain:
    """The end of a history: nobody arrives any more, and everybody is to finish in time."""

    def __init__(self, bed: Bed, step_ms: int, budget: int, is_priority: bool) -> None:
        self.bed = bed
        self.step_ns = step_ms * NS_PER_MS
        self.is_priority = is_priority
        self.start_ns = bed.now_ns
        self.compiling_ns = max(bed.last_grammar_ns - bed.now_ns, 0)
        # A load is seen to have ended by a step after it.
        self.load_ns = bed.load_ns + (bed.pipeline + 2) * self.step_ns
        self.first_step, self.first_nap = len(bed.steps), bed.naps
        self.earlier_preemptions = bed.laws.preemptions.copy()
        self.chunk = budget - MOST_ACTIVE  # what decodes leave of a step to prompts, at least
        self.live = [*bed.scheduler.requests]
        self.has_begun = {each for each in bed.residents() if bed.answers[each]}
        self.users = {bed.user_of(each): None for each in self.live}
        self.tokens = {
            each: bed.scripts[each].max_tokens - len(bed.answers[each]) for each in self.live
        }
        self.more_turns = {
            each: len(bed.requests[each].streaming_queue or ()) for each in self.live
        }
        limiter = bed.scheduler._limiter
        self.first_token_ns = {
            user: max(limiter.account_ready_at_ns(limiter.account(user)) - self.start_ns, 0)
            for user in self.users
        }

    def check(self) -> None:
        """Let everybody finish, and check when each did."""
        bed = self.bed
        bed.run(most_steps=5_000)
        busy_ns = self.busy_ns()
        for user in self.users:
            ends_ns = [bed.finished_ns.get(each, 0) for each in self.of(user)]
            took_ns = max(ends_ns) - self.start_ns
            assert took_ns <= self.longest_ns(user, busy_ns), f"{user} starved"

    def of(self, user: str) -> list[str]:
        """Return the requests of a user."""
        return [each for each in self.live if self.bed.user_of(each) == user]

    def starts(self, request_id: str) -> int:
        """Return how often a request is admitted, or goes on in the middle of its prompt."""
        again = self.bed.laws.preemptions - self.earlier_preemptions
        has_to_begin = request_id not in self.has_begun
        return again[request_id] + has_to_begin + self.more_turns[request_id]

    def samples(self, request_ids: list[str]) -> int:
        """Return how often requests are sampled, at most: in vain once at every end."""
        return sum(self.tokens[each] + self.starts(each) + 1 for each in request_ids)

    def loading_ns(self) -> int:
        """Return the longest time in which somebody's KV blocks are being loaded."""
        loads = sum(self.starts(each) for each in self.live if self.bed.is_loaded(each))
        return loads * self.load_ns

    def prompt_steps(self) -> int:
        """Return how many steps compute a chunk of a prompt, at most."""
        return sum(
            self.starts(each) * ceil(self.bed.requests[each].num_tokens / self.chunk)
            for each in self.live
        )

    def busy_ns(self) -> int:
        """Return the time that steps took; there are no more than the work needs."""
        computed = [each for each in self.bed.steps[self.first_step :] if each.computed]
        naps = self.bed.naps - self.first_nap
        most = self.samples(self.live) + self.prompt_steps()
        assert len(computed) <= most, "steps for nothing"
        # A pipeline is looked at once per stage while a request is on its way through it.
        awaited_ns = self.compiling_ns + self.loading_ns()
        most_naps = most * self.bed.pipeline + ceil(awaited_ns / NS_PER_MS)
        assert naps <= most_naps, "looking for work for nothing"
        in_flight = self.bed.pipeline + 1
        return (len(computed) + in_flight) * self.step_ns + naps * NS_PER_MS

    def quota_ns(self, user: str, request_ids: list[str]) -> int:
        """Return how long the user's quota takes for the rest of some of its requests."""
        rate = self.bed.pacing.users[user]
        if rate is None or not request_ids:
            return 0
        return self.first_token_ns[user] + ceil(self.samples(request_ids) / rate * NS_PER_SECOND)

    def longest_ns(self, user: str, busy_ns: int) -> int:
        """Return the time in which everything of a user must have ended."""
        own_ns = self.compiling_ns + self.loading_ns() + self.quota_ns(user, self.of(user))
        if self.finds_position(user):
            busy_ns = min(busy_ns, self.round_ns() * self.steps_by_weight(user))
        others_ns = sum(
            self.quota_ns(other, self.may_hold_up(user, other))
            for other in self.users
            if other != user
        )
        return own_ns + busy_ns + others_ns

    def round_ns(self) -> int:
        """Return the longest time from a step of a request to its next, if nobody else is due."""
        # While a request is on its way through a pipeline the engine naps a millisecond at a time.
        return self.step_ns + (NS_PER_MS if self.bed.pipeline > 1 else 0)

    def may_hold_up(self, user: str, other: str) -> list[str]:
        """Return the requests of another user whose tokens this one may have to wait for."""
        if not self.finds_slot(user) or self.waits_for_adapter():
            return self.of(other)
        if not self.is_priority:
            return []
        worst = max(self.bed.requests[each].priority for each in self.of(user))
        return [each for each in self.of(other) if self.bed.requests[each].priority < worst]

    def finds_slot(self, user: str) -> bool:
        """Return whether the user gets a slot by its share, whoever holds them all.

        Somebody with s slots gives way if (s - 1) / its weight ≥ 1 / the user's weight. If nobody
        did, each would hold at most its weight by the user's, rounded up.
        """
        weight = self.weight_of(user)
        others = sum(ceil(self.weight_of(each) / weight) for each in self.users if each != user)
        return self.shares_slots() and self.bed.max_num_seqs > others

    def finds_position(self, user: str) -> bool:
        """Return whether nothing but positions is scarce."""
        has_slots = self.shares_slots() and len(self.live) <= self.bed.max_num_seqs
        return has_slots and not self.is_priority and not self.waits_for_adapter()

    def waits_for_adapter(self) -> bool:
        """Return whether requests may have to wait until vLLM has room for their LoRA adapter."""
        adapters = {self.bed.requests[each].lora_request for each in self.live} - {None}
        return len(adapters) > (self.bed.max_loras or 0)

    def shares_slots(self) -> bool:
        """Return whether slots are shared and KV blocks are never scarce."""
        bed = self.bed
        most_blocks = bed.max_num_seqs * MOST_BLOCKS * bed.layer_groups
        return bed.pacing.fairness and bed.num_blocks > most_blocks

    def weight_of(self, user: str) -> Fraction:
        """Return the user's weight."""
        return self.bed.pacing.weights[user]

    def steps_by_weight(self, user: str) -> int:
        """Return the steps in which a user has all its tokens by its share of the positions.

        A whole position is its own in every step. Less than that adds up to one in so many steps,
        and of those that are owed more by then each goes before it once.
        """
        share = self.weight_of(user) * self.bed.max_active / sum(map(self.weight_of, self.users))
        wait = 1 if share >= 1 else ceil(2 / share)
        return self.prompt_steps() + self.samples(self.of(user)) * wait + 2


class AnyHistory(RuleBasedStateMachine):
    """Arrivals, aborts, time, resets and pauses in any order, on a small KV cache."""

    is_async: bool

    @initialize(
        policy=st.sampled_from(["fcfs", "fcfs", "priority"]),
        chunked_prefill=st.booleans(),
        v2_model_runner=st.booleans(),
        max_num_seqs=st.integers(2, 8) | st.just(16),
        active_share=st.integers(1, 4),
        num_blocks=st.none() | st.integers(MOST_BLOCKS + 1, 40),
        step_ms=st.sampled_from([1, 10, 30, 150]),
        drafts_and_stages=st.sampled_from([(0, 1), (1, 1), (4, 1), (0, 2), (0, 3), (1, 2), (4, 3)]),
        layers=st.just("full") | st.sampled_from(DECODERS),
        max_loras=st.sampled_from([None, None, 1, 2]),
        load_ms=st.sampled_from([None, None, 1, 80]),
        has_sessions=st.sampled_from([False, False, True]),
        fairness=st.sampled_from([True, True, True, False]),
        burst_seconds=st.sampled_from([0.1, 0, 1]),
        rates=st.fixed_dictionaries(dict.fromkeys(USERS, rates)),
        weights=st.fixed_dictionaries(dict.fromkeys(USERS, weights)),
    )
    def build(
        self,
        max_num_seqs: int,
        active_share: int,
        num_blocks: int | None,
        chunked_prefill: bool,
        drafts_and_stages: tuple[int, int],
        layers: str,
        load_ms: int | None,
        has_sessions: bool,
        **kwargs: Any,
    ) -> None:
        """Build an engine core, small enough for everything to run short."""
        self.aborted: set[str] = set()
        self.turns: dict[str, int] = {}  # of each session that is not ended
        self.has_sessions = has_sessions
        if has_sessions:
            # They keep their blocks between two turns: were these scarce, vLLM would never end.
            num_blocks = None
            load_ms = None  # a load and a session may both be what has KV blocks and waits
        self.is_priority = kwargs["policy"] == "priority"
        self.step_ms = kwargs["step_ms"]
        self.budget = 16 if chunked_prefill else 2048
        drafts, pipeline = drafts_and_stages
        self.bed = Bed(
            is_async=self.is_async,
            max_num_seqs=max_num_seqs,
            max_num_active_seqs=min(max(1, max_num_seqs // active_share), MOST_ACTIVE),
            max_num_batched_tokens=self.budget,
            chunked_prefill=chunked_prefill,
            # A synchronous pipeline has no drafts: vLLM would schedule them too early.
            drafts=drafts if pipeline == 1 or self.is_async else 0,
            pipeline=pipeline,
            block_size=BLOCK_SIZE,
            layers=layers,
            load_ms=load_ms if layers in ("full", "latent") else None,
            num_blocks=(num_blocks or max_num_seqs * (MOST_BLOCKS + 1) + 1) * layer_groups(layers),
            **kwargs,
        )

    @rule(
        user=st.sampled_from(USERS),
        prompt=st.integers(1, MOST_PROMPT),
        shares_prefix=st.booleans(),
        tokens=st.integers(1, MOST_TOKENS),
        ends_with=st.sampled_from([None, EOS, STOP]),
        priority=st.integers(0, 2),
        adapter=st.none() | st.integers(1, 3),
        grammar_ms=st.none() | st.none() | st.sampled_from([0, 10, 200]),
        loads=st.none() | st.tuples(st.integers(1, MOST_PROMPT + len(PREFIX)), st.booleans()),
        load_fails=st.booleans(),
        count=st.integers(1, 4),
    )
    def arrive(
        self,
        prompt: int,
        shares_prefix: bool,
        adapter: int | None,
        loads: tuple[int, bool] | None,
        load_fails: bool,
        count: int,
        **kwargs: Any,
    ) -> None:
        """Some requests arrive, perhaps with a prefix that is cached, here or elsewhere."""
        has_connector = self.bed.scheduler.connector is not None
        for _ in range(count):
            self.bed.add(
                prompt=[*PREFIX, *range(50, 50 + prompt)] if shares_prefix else prompt,
                adapter=adapter if self.bed.max_loras else None,
                loads=loads if has_connector else None,
                load_fails=load_fails and has_connector,
                **kwargs,
            )

    @precondition(lambda self: self.has_sessions)
    @rule(
        user=st.sampled_from(USERS),
        priority=st.integers(0, 2),
        adapter=st.none() | st.integers(1, 3),
        **TURN,
    )
    def begin_session(self, adapter: int | None, **kwargs: Any) -> None:
        """A session begins."""
        adapter = adapter if self.bed.max_loras else None
        self.turns[self.bed.add(is_session=True, adapter=adapter, **kwargs)] = 1

    @precondition(lambda self: self.open_sessions())
    @rule(data=st.data(), **TURN)
    def say(self, data: st.DataObject, **turn: Any) -> None:
        """A session gets its next input, perhaps before it has answered the last."""
        session = data.draw(st.sampled_from(self.open_sessions()))
        if self.turns[session] < MOST_TURNS:
            self.bed.say(session, **turn)
            self.turns[session] += 1

    @precondition(lambda self: self.open_sessions())
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        """Nothing more is said to a session."""
        self.end_session(data.draw(st.sampled_from(self.open_sessions())))
        self.bed.check()

    def open_sessions(self) -> list[str]:
        """Return the sessions that can get another input."""
        return [each for each in self.turns if each in self.bed.scheduler.requests]

    def end_session(self, session: str) -> None:
        """Say nothing more to a session."""
        del self.turns[session]
        self.bed.hang_up(session)

    @rule(data=st.data(), during_step=st.booleans(), count=st.integers(1, 3))
    def abort(self, data: st.DataObject, during_step: bool, count: int) -> None:
        """A client gives up, before a step or while it is computed."""
        live = list(self.bed.scheduler.requests)
        if live:
            ids = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=count))
            self.bed.abort(*ids, during_step=during_step)
            self.aborted.update(ids)
            self.bed.check()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        """The engine steps at once, without waiting for quota."""
        for _ in range(count):
            if self.bed.has_work:
                self.bed.step()

    @rule(ms=st.integers(1, 300))
    def go_on(self, ms: int) -> None:
        """The engine runs as its loop would."""
        self.bed.run(until_ms=self.bed.now_ms + ms, most_steps=2_000)

    @rule(ms=st.integers(1, 300))
    def stall(self, ms: int) -> None:
        """Time passes without a step."""
        self.bed.clock.advance_ns(ms * 1_000_000)

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        """Somebody resets the prefix cache, perhaps under running requests."""
        # Under a connector vLLM cannot do it while blocks may be written to.
        reset_running = reset_running and self.bed.scheduler.connector is None
        # And vLLM 0.32 loses a session that it preempts while its turn is ending.
        reset_running = reset_running and not self.has_sessions
        self.bed.core.reset_prefix_cache(reset_running_requests=reset_running)
        self.bed.check()

    @rule(state=st.sampled_from([*PauseState]))
    def pause(self, state: PauseState) -> None:
        """Somebody pauses or unpauses the scheduler as a whole."""
        self.bed.scheduler.set_pause_state(state)

    @precondition(lambda self: self.bed.scheduler.pause_state == PauseState.UNPAUSED)
    @precondition(lambda self: self.bed.core.aborts_queue.empty())  # it would end the rest
    @rule()
    def wake_exactly(self) -> None:
        """A quiet scheduler computes nothing before the instant it names."""
        quiet_ns = self.bed.scheduler.quiet_until_ns()
        if quiet_ns is not None and quiet_ns - 1 > self.bed.now_ns:
            self.bed.clock.advance_ns(quiet_ns - 1 - self.bed.now_ns)
            assert self.bed.step() == []
            assert self.bed.scheduler.quiet_until_ns() == quiet_ns

    def teardown(self) -> None:
        """Let everybody finish, in bounded time, and look for what is left."""
        if not hasattr(self, "bed"):
            return
        bed = self.bed
        bed.scheduler.set_pause_state(PauseState.UNPAUSED)
        for session in self.open_sessions():
            self.end_session(session)
        Drain(bed, self.step_ms, self.budget, self.is_priority).check()
        bed.check_window_bound()
        for request_id, script in bed.scripts.items():
            answer = bed.answers[request_id]
            if request_id not in self.aborted:
                assert len(answer) == script.max_tokens
                expected = FinishReason.STOP if script.ends_by_itself else FinishReason.LENGTH
                assert bed.finished[request_id] == expected
        bed.check_empty()


@pytest.mark.timeout(600)
def test_any_history(is_async: bool) -> None:
    """Whatever happens, the laws hold after every step and everybody is served in the end."""
    machine = type("AnyHistory", (AnyHistory,), {"is_async": is_async})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_request_alone_in_a_pipeline_ends_as_on_stock(is_async: bool) -> None:
    """Between steps of a millisecond the engine naps for a millisecond, with limits or without."""
    ends_ns = []
    for paced in (True, False):
        bed = Bed({"a": None}, paced=paced, is_async=is_async, pipeline=3, step_ms=1)
        bed.add("a", prompt=1, tokens=6)
        bed.run()
        ends_ns.append(bed.finished_ns["a-0"])
    assert ends_ns[0] == ends_ns[1]


def test_the_law_knows_the_naps_of_a_pipeline(is_async: bool) -> None:
    """A request alone in a pipeline is not taken for one that starved."""
    bed = Bed({"a": None}, weights={"a": 1}, is_async=is_async, pipeline=3, step_ms=1)
    bed.add("a", prompt=1, tokens=6)
    Drain(bed, step_ms=1, budget=MOST_ACTIVE + 1, is_priority=False).check()
