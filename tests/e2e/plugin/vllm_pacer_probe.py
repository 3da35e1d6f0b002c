"""Loaded by vLLM in every process of a server under test: async scheduling on CPU, and a record.

vLLM finds it like any plugin, because this folder is on the server's `PYTHONPATH`. It does nothing
unless its environment variables ask for it.

* `PACER_PROBE_ASYNC=1`: vLLM's CPU platform switches asynchronous scheduling off because its
  worker gains nothing from it. It is switched on again for the front end and the engine, so that
  these run as on a GPU, with two batches in flight, and off for the worker, which executes the
  steps in order.
* `PACER_PROBE_WORKERS_REST=1`: a worker that awaits its next step sleeps half a millisecond at a
  time. vLLM's spin, and where they take every core, the API server starves for many seconds.
* `PACER_PROBE_RECORD=FILE`: what the scheduler does is appended to the file, one JSON object
  a line. Only public results and the limiter's own calls are recorded, in the engine's process.
"""

import json
import os
import time
from collections import Counter
from functools import partial
from typing import Any


def register() -> None:
    """Install what the environment asks for; vLLM calls this once in each process."""
    if os.environ.get("PACER_PROBE_ASYNC") == "1":
        _serve_async_on_cpu()
    if os.environ.get("PACER_PROBE_WORKERS_REST") == "1":
        _let_workers_rest()
    if path := os.environ.get("PACER_PROBE_RECORD"):
        _record_schedulers(path)


def _serve_async_on_cpu() -> None:
    from vllm.platforms.cpu import CpuPlatform

    update_config = CpuPlatform.check_and_update_config.__func__

    def update_config_and_stay_async(cls: type, vllm_config: Any) -> None:
        update_config(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(update_config_and_stay_async)

    from vllm.v1.worker.worker_base import WorkerWrapperBase

    init_worker = WorkerWrapperBase.init_worker

    def init_worker_in_order(self: Any, all_kwargs: list[dict[str, Any]]) -> None:
        for kwargs in all_kwargs:
            if "vllm_config" in kwargs:
                kwargs["vllm_config"].scheduler_config.async_scheduling = False
        init_worker(self, all_kwargs)

    WorkerWrapperBase.init_worker = init_worker_in_order


def _let_workers_rest() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = partial(time.sleep, 0.0005)


def _record_schedulers(path: str) -> None:
    from vllm_pacer.engine.factory import PacedSchedulerFactory

    build = PacedSchedulerFactory.__call__

    def build_recorded(self: PacedSchedulerFactory, *args: Any, **kwargs: Any) -> Any:
        scheduler = build(self, *args, **kwargs)
        Recorder(path, scheduler, kwargs["vllm_config"])
        return scheduler

    PacedSchedulerFactory.__call__ = build_recorded


class StepClock:
    """The monotonic clock; remembers what it showed first since `first_ns` was cleared."""

    def __init__(self) -> None:
        self.first_ns: int | None = None

    def now_ns(self) -> int:
        """Return `time.monotonic_ns()`."""
        now_ns = time.monotonic_ns()
        if self.first_ns is None:
            self.first_ns = now_ns
        return now_ns


class Recorder:
    """Writes down what one scheduler does, by standing in front of its methods."""

    def __init__(self, path: str, scheduler: Any, vllm_config: Any) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open as long as the engine lives
        self._scheduler = scheduler
        self._clock = scheduler._clock = StepClock()
        self._taken: Counter[str] = Counter()
        self._step_count = 0
        self._step_of: dict[int, tuple[int, Any]] = {}
        self._write(
            engine=os.getpid(),
            scheduler=type(scheduler).__name__,
            bases=[cls.__name__ for cls in type(scheduler).__mro__],
            max_concurrent_batches=vllm_config.max_concurrent_batches,
        )
        self._schedule = scheduler.schedule
        self._update_from_output = scheduler.update_from_output
        self._add_request = scheduler.add_request
        self._finish_requests = scheduler.finish_requests
        self._preempt_request = scheduler._preempt_request
        self._take_granted = scheduler._limiter.take_granted
        self._repeat = scheduler._limiter.repeat
        self._give_back = scheduler._limiter.give_back
        self._dispatch = scheduler._ledger.dispatch
        scheduler.schedule = self.schedule
        scheduler.update_from_output = self.update_from_output
        scheduler.add_request = self.add_request
        scheduler.finish_requests = self.finish_requests
        scheduler._preempt_request = self.preempt_request
        scheduler._limiter.take_granted = self.take_granted
        scheduler._limiter.repeat = self.repeat
        scheduler._limiter.give_back = self.give_back
        scheduler._ledger.dispatch = self.dispatch

    def _write(self, **what: Any) -> None:
        self._file.write(json.dumps(what) + "\n")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step is put together at the first instant it reads from the clock."""
        self._taken.clear()
        self._clock.first_ns = None
        output = self._schedule(*args, **kwargs)
        self._step_count += 1
        computed = len(output.num_scheduled_tokens)
        if computed:
            # The output is kept, or another could get its id.
            self._step_of[id(output)] = self._step_count, output
        self._write(
            step=self._step_count,
            at_ns=self._clock.first_ns,
            computed=computed,
            resident=len(self._scheduler.running),
            paused=len(self._scheduler._pauses.requests),
            in_flight=len(self._step_of),
            free_blocks=self._free_blocks(),
            taken=dict(self._taken),
            sampled=[each for each in output.num_scheduled_tokens if self._samples(each)],
        )
        return output

    def _samples(self, request_id: str) -> bool:
        return not self._scheduler.requests[request_id].is_prefill_chunk

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """A step's tokens leave the scheduler, by request."""
        step, _ = self._step_of.pop(id(scheduler_output), (None, None))
        outputs = self._update_from_output(scheduler_output, model_runner_output)
        each_output = [each for client in outputs.values() for each in client.outputs]
        self._write(
            output_of=step,
            at_ns=time.monotonic_ns(),
            emitted={
                each.request_id: len(each.new_token_ids)
                for each in each_output
                if each.new_token_ids
            },
            finished=[each.request_id for each in each_output if each.finish_reason is not None],
        )
        return outputs

    def add_request(self, request: Any) -> None:
        """A request arrives, with the user that the engine sees."""
        self._add_request(request)
        user = self._scheduler._owner_of.get(request)
        name = user.account.user if user else None
        self._write(request=request.request_id, user=name, at_ns=time.monotonic_ns())

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """The front end ends requests: a client's abort or a stop string."""
        finished = self._finish_requests(request_ids, finished_status)
        self._write(
            aborted=[request.request_id for request in finished],
            resident=len(self._scheduler.running),
            paused=len(self._scheduler._pauses.requests),
            free_blocks=self._free_blocks(),
            at_ns=time.monotonic_ns(),
        )
        return finished

    def _free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """A request loses its KV blocks."""
        was_paused = request in self._scheduler._pauses.requests
        self._preempt_request(request, *args, **kwargs)
        self._write(preempted=request.request_id, was_paused=was_paused)

    def take_granted(self, tokens_of: Any, *args: Any) -> Any:
        """The charges of a step; written with it."""
        for account, tokens in tokens_of.items():
            self._taken[account.user] += tokens
        return self._take_granted(tokens_of, *args)

    def repeat(self, tokens_of: Any, now_ns: int) -> Any:
        """The charges of a step that are those of the last one; written with it."""
        step = self._repeat(tokens_of, now_ns)
        if step is not None:
            for account, tokens in tokens_of.items():
                self._taken[account.user] += tokens
        return step

    def dispatch(self, step: int, charges: Any, flight: object) -> None:
        """The charges of users without a limit, for which the limiter is not asked."""
        for account, tokens in charges.by_request.values():
            if not account.limited:
                self._taken[account.user] += tokens
        self._dispatch(step, charges, flight)

    def give_back(self, account: Any, step: int, now_ns: int, tokens: int = 1) -> None:
        """A refund."""
        self._give_back(account, step, now_ns, tokens)
        self._write(refunded=account.user, tokens=tokens, at_ns=now_ns)
