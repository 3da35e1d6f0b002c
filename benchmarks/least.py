"""The least that a limiter in the scheduler costs for one user, whoever writes it in Python.

It reads the clock, takes a quota per user and step, and compares what was emitted with what was
charged. To pause, share, refund or count anything would come on top. With several users it is not
the least: to take from each in every step can be avoided.
"""

from collections import Counter
from operator import attrgetter
from time import monotonic_ns
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_pacer.engine.identity import user_of

_INTERVAL_NS = 1_000
_BURST_NS = 100_000_000

_new_tokens = attrgetter("new_token_ids")


class LeastScheduler(Scheduler):
    """vLLM's scheduler with quotas that it must not come to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._repeated: dict[str, int] = {}
        self._tokens_of: dict[str, int] = {}
        self._tat_of: dict[str, int] = {}
        self._in_flight: dict[int, tuple[SchedulerOutput, int]] = {}
        self._unused_tokens = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Charge every request that is scheduled."""
        now_ns = monotonic_ns()
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        if scheduled != self._repeated:
            self._repeated = scheduled
            users = (user_of(self.requests[each].sampling_params) for each in scheduled)
            self._tokens_of = Counter(users)
        horizon_ns = now_ns + _BURST_NS
        tat_of = self._tat_of
        for user, tokens in self._tokens_of.items():
            tat_ns = tat_of.get(user, 0)
            if tat_ns < now_ns:
                tat_ns = now_ns  # `max` would cost a call
            tat_of[user] = tat_ns = tat_ns + tokens * _INTERVAL_NS
            if tat_ns > horizon_ns:
                raise RuntimeError(f"{user} came to its quota.")
        self._in_flight[id(output)] = output, len(scheduled)
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any) -> Any:
        """Compare what was emitted with what was charged."""
        outputs = super().update_from_output(scheduler_output, *args)
        _, charged = self._in_flight.pop(id(scheduler_output))
        emitted = 0
        for client_outputs in outputs.values():
            emitted += sum(map(len, map(_new_tokens, client_outputs.outputs)))
        if emitted != charged:
            self._unused_tokens += charged - emitted
        return outputs


class LeastAsyncScheduler(LeastScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""
