"""The laws under random histories of the real engine core.

`Bed.check` compares its books with the scheduler's after every step; the machine adds what holds
over a whole history: the window bound, and that everybody is served in the end.
"""

import os
from collections import Counter
from typing import Any

import pytest
from engine_bed import EOS, STOP, Bed
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

RATES = {"a": 20, "b": 100, "c": None, "d": 5}
PREFIX = [7] * 16
EXAMPLES = int(os.environ.get("PACER_ENGINE_EXAMPLES", "40"))


class AnyHistory(RuleBasedStateMachine):
    """Arrivals, aborts, time, resets and pauses in any order, on a small KV cache."""

    is_async: bool

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        chunked_prefill=st.booleans(),
        v2_model_runner=st.booleans(),
        max_num_seqs=st.integers(2, 8),
        active_share=st.integers(1, 4),
        num_blocks=st.integers(16, 40),
        step_ms=st.sampled_from([1, 10, 30, 150]),
    )
    def build(
        self, max_num_seqs: int, active_share: int, chunked_prefill: bool, **kwargs: Any
    ) -> None:
        """Build an engine core, small enough for everything to run short."""
        self.aborted: set[str] = set()
        self.bed = Bed(
            RATES,
            is_async=self.is_async,
            max_num_seqs=max_num_seqs,
            max_num_active_seqs=max(1, max_num_seqs // active_share),
            max_num_batched_tokens=16 if chunked_prefill else 256,
            chunked_prefill=chunked_prefill,
            block_size=4,
            **kwargs,
        )

    @rule(
        user=st.sampled_from([*RATES]),
        prompt=st.integers(1, 30),
        shares_prefix=st.booleans(),
        tokens=st.integers(1, 12),
        ends_with=st.sampled_from([None, EOS, STOP]),
        priority=st.integers(0, 2),
        count=st.integers(1, 4),
    )
    def arrive(self, prompt: int, shares_prefix: bool, count: int, **kwargs: Any) -> None:
        """Some requests arrive, perhaps with a prefix that is cached."""
        for _ in range(count):
            self.bed.add(
                prompt=[*PREFIX, *range(50, 50 + prompt)] if shares_prefix else prompt, **kwargs
            )

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
        self.bed.run(until_ms=self.bed.now_ms + ms)

    @rule(ms=st.integers(1, 300))
    def stall(self, ms: int) -> None:
        """Time passes without a step."""
        self.bed.clock.advance_ns(ms * 1_000_000)

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running: bool) -> None:
        """Somebody resets the prefix cache, perhaps under running requests."""
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
        left = Counter[str]()
        for request_id in bed.scheduler.requests:
            left[bed.user_of(request_id)] += bed.scripts[request_id].max_tokens
        slowest_s = max(left[user] / rate for user, rate in RATES.items() if rate)
        deadline_ms = bed.now_ms + 1000 * slowest_s + 500 * (left.total() + 1)
        bed.run(most_steps=200_000)
        assert bed.now_ms <= deadline_ms, "somebody starved"
        bed.check_window_bound()
        for request_id, script in bed.scripts.items():
            answer = bed.answers[request_id]
            if request_id not in self.aborted:
                assert len(answer) == script.max_tokens
                expected = FinishReason.STOP if script.last_token else FinishReason.LENGTH
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
