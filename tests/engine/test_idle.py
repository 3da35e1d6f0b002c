"""An engine in which everybody is paused waits for the next token, a request or an abort.

`EngineCoreProc._process_engine_step` is vLLM's own, wrapped; its queue moves the fake clock instead
of waiting, and notes for how long it was asked to wait.
"""

import queue
import time
from typing import Any

import pytest
from engine_bed import NS_PER_MS, Bed
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import InprocClient

from vllm_pacer.clock import NS_PER_SECOND, FakeClock
from vllm_pacer.engine.idle import LONGEST_WAIT_NS, install_idle_wait


class FakeTimeQueue(queue.Queue[Any]):
    """A queue whose waiting moves the fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.waits_ns: list[int] = []
        self._clock = clock

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return what is there; otherwise let the time pass and raise `queue.Empty`."""
        if self.empty():
            assert block, "nobody looks without being ready to wait"
            assert timeout is not None
            wait_ns = round(timeout * NS_PER_SECOND)
            self.waits_ns.append(wait_ns)
            self._clock.advance_ns(wait_ns)
        return super().get(block=False)


@pytest.fixture(autouse=True)
def _idle_wait_for_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((EngineCoreProc, "_process_engine_step"), (InprocClient, "get_output")):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back at the end
    install_idle_wait()


@pytest.fixture
def naps_ns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sleeps of vLLM's loop: none of them is real here."""
    naps: list[int] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: naps.append(round(seconds * NS_PER_SECOND)))
    return naps


def engine_of(bed: Bed) -> Any:
    """The engine process's loop around the bed's core.

    `EngineCoreProc.__init__` opens sockets and threads for a front end; the loop itself needs the
    core's attributes and two queues.
    """
    engine = object.__new__(EngineCoreProc)
    vars(engine).update(vars(bed.core))
    engine.input_queue = FakeTimeQueue(bed.clock)
    engine.output_queue = queue.Queue()
    return engine


def all_paused(is_async: bool, streams: int = 3, rate: float = 0.5) -> Bed:
    """A bed in which every request is paused until 1/rate - burst."""
    bed = Bed({"a": rate}, is_async=is_async, max_num_seqs=32)
    for _ in range(streams):
        bed.add("a", prompt=5, tokens=4)
    while bed.scheduler.quiet_until_ns() is None:
        bed.step()
    return bed


def test_quiet_until_the_next_token_exactly(is_async: bool) -> None:
    """Once all are paused and nothing is in flight, the scheduler names the very instant."""
    bed = all_paused(is_async)
    assert bed.scheduler.quiet_until_ns() == 2 * NS_PER_SECOND - 100 * NS_PER_MS
    bed.clock.advance_ns(bed.scheduler.quiet_until_ns() - 1 - bed.now_ns)
    assert bed.step() == []
    bed.clock.advance_ns(1)
    assert len(bed.step()) == 1


def test_not_quiet_while_anything_can_run(is_async: bool) -> None:
    """While a stream without a limit runs, nobody waits, however many are paused."""
    bed = Bed({"a": 1}, is_async=is_async)
    bed.add("a", tokens=3)
    bed.add("unlimited", tokens=15)
    while "unlimited-1" not in bed.finished:
        bed.step()
        assert bed.scheduler.quiet_until_ns() is None or "unlimited-1" in bed.finished


def test_not_quiet_while_a_step_is_in_flight() -> None:
    """A result that is still to be processed is never left waiting."""
    bed = Bed({"a": 1}, is_async=True)
    bed.add("a", tokens=3)
    bed.step()
    assert bed.in_flight.total() == 1
    assert bed.scheduler.quiet_until_ns() is None
    bed.step()
    assert bed.scheduler.quiet_until_ns() is None or not bed.in_flight


def test_quiet_for_a_waiting_request(is_async: bool) -> None:
    """A request that waits in the queue for its user's token is waited for like a paused one."""
    bed = Bed({"a": 1}, is_async=is_async)
    bed.add("a", prompt=1, tokens=1)
    bed.run()
    bed.add("a", prompt=1, tokens=1)
    while bed.scheduler.quiet_until_ns() is None:
        bed.step()
    assert bed.scheduler.quiet_until_ns() == 900 * NS_PER_MS


def test_not_quiet_after_a_change(is_async: bool) -> None:
    """A new request and an abort both want a step at once."""
    bed = all_paused(is_async)
    newcomer = bed.add("b", tokens=1)
    assert bed.scheduler.quiet_until_ns() is None
    bed.run(until_ms=bed.now_ms + 200)
    assert newcomer in bed.finished
    assert bed.scheduler.quiet_until_ns() is not None
    bed.abort("a-1")
    assert bed.scheduler.quiet_until_ns() is None


def test_not_quiet_after_a_reset_of_running_requests(is_async: bool) -> None:
    """What a reset takes out of the paused ones goes on by its own quota, not by another's."""
    bed = Bed({"slow": 0.01, "b": 10}, is_async=is_async)
    bed.add("slow", prompt=[5], tokens=1)
    bed.run()
    paced = bed.add("b", prompt=10, tokens=20)
    bed.run(until_ms=500)
    bed.add("slow", prompt=[7], tokens=1)
    while bed.scheduler.quiet_until_ns() is None:
        bed.step()
    bed.core.reset_prefix_cache(reset_running_requests=True)
    assert bed.scheduler.quiet_until_ns() is None
    bed.run(until_ms=bed.now_ms + 3_000)
    assert paced in bed.finished


def test_waits_in_the_queue_until_the_next_token(is_async: bool, naps_ns: list[int]) -> None:
    """The loop waits for at most 50 ms at a time and dispatches at the very instant."""
    bed = all_paused(is_async)
    engine = engine_of(bed)
    due_ns = bed.scheduler.quiet_until_ns()
    begin_ns = bed.now_ns
    dispatched = len(bed.dispatched_ns("a"))
    while len(bed.dispatched_ns("a")) == dispatched:
        engine._process_engine_step()
    assert bed.dispatched_ns("a")[-1] == due_ns
    waits_ns = engine.input_queue.waits_ns
    assert sum(waits_ns) == due_ns - begin_ns
    assert {*waits_ns[:-1]} == {LONGEST_WAIT_NS}
    assert 0 < waits_ns[-1] <= LONGEST_WAIT_NS


def test_request_ends_the_wait(is_async: bool, naps_ns: list[int]) -> None:
    """A request that comes is handled without a step before it, and runs in the next one."""
    bed = all_paused(is_async)
    engine = engine_of(bed)
    handled: list[Any] = []
    engine._handle_client_request = lambda *request: handled.append(request)
    engine.input_queue.put((EngineCoreRequestType.ABORT, ["a-0"]))
    steps, now_ns = len(bed.steps), bed.now_ns
    assert engine._process_engine_step() is False
    assert handled == [(EngineCoreRequestType.ABORT, ["a-0"])]
    assert (len(bed.steps), bed.now_ns) == (steps, now_ns)


def test_never_waits_with_work_at_hand(is_async: bool, naps_ns: list[int]) -> None:
    """With a step in flight or a request to run, the loop goes straight to vLLM's own."""
    bed = Bed({"a": 1}, is_async=is_async)
    bed.add("a", tokens=3)
    bed.add("unlimited", tokens=10)
    engine = engine_of(bed)
    while bed.scheduler.requests.keys() & {"unlimited-1"}:
        engine._process_engine_step()
    assert engine.input_queue.waits_ns == []


def test_never_holds_a_rank_of_a_group(is_async: bool, naps_ns: list[int]) -> None:
    """A rank that steps together with others is not made to wait."""
    bed = all_paused(is_async)
    engine = engine_of(bed)
    engine.vllm_config.parallel_config.data_parallel_size = 2
    engine._process_engine_step()
    assert engine.input_queue.waits_ns == []


def test_twenty_paused_streams_cost_twenty_looks_a_second(
    is_async: bool, naps_ns: list[int]
) -> None:
    """All paused for 20 s with 20 streams: at most 25 calls of schedule() a second."""
    bed = all_paused(is_async, streams=20, rate=0.04)
    engine = engine_of(bed)
    until_ns, steps = bed.now_ns + 20 * NS_PER_SECOND, len(bed.steps)
    while bed.now_ns < until_ns:
        engine._process_engine_step()
    assert len(bed.steps) - steps <= 20 * 25


def test_offline_client_waits_too(naps_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The in-process client, which has no queue, sleeps instead of asking again and again."""
    bed = all_paused(is_async=False, rate=5)
    client = object.__new__(InprocClient)  # its __init__ would build an engine of its own
    client.engine_core = bed.core
    due_ns, begin_ns = bed.scheduler.quiet_until_ns(), bed.now_ns
    sleeps_ns: list[int] = []

    def sleep(seconds: float) -> None:
        sleeps_ns.append(round(seconds * NS_PER_SECOND))
        bed.clock.advance_ns(sleeps_ns[-1])

    monkeypatch.setattr(time, "sleep", sleep)
    while len(bed.dispatched_ns("a")) < 2:
        client.get_output()
    assert sum(sleeps_ns) == due_ns - begin_ns
    assert bed.dispatched_ns("a")[-1] == due_ns
