"""A public multi-tenant trace, replayed against the real scheduler on a virtual clock.

The trace, the measure of fairness and the two results to compare with are those of the Virtual
Token Counter (Sheng et al., OSDI 2024): 1,500 requests of 27 users of a chatbot arena over 600
seconds, more than the engine can serve. The time that a step takes is chosen such that vLLM's own
order serves what was published for first come, first served.

In a window of sixty seconds a user has *asked* for the service (prompt + 2 × output tokens) of the
requests that arrived in it, and *got* that of its requests in proportion to the part of their time
from first to last token that lies in it. A window's difference is the sum over users of
min(best user's got - own got, |asked - got|) / 60.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from bed import TOKEN, make_scheduler, result_of
from counter_queue import CounterQueue
from vllm_pacer import PacerConfig
from vllm_pacer.clock import NS_PER_SECOND, FakeClock

TRACE = Path(__file__).parent / "traces" / "multi_tenant.csv"
RESIDENTS, ACTIVE = 64, 32
STEP_NS = 59_300_000
WINDOW_SECONDS = 60
_NAP_NS = 1_000_000  # what vLLM's loop sleeps after a step that computed nothing
WINDOWS = [28.5 * k for k in range(1, 20)]

COUNTER = "Virtual Token Counter"
ORDERS = {
    "first come, first served (stock)": None,
    COUNTER: None,
    "vllm-pacer without limits": PacerConfig(default=None),
    "vllm-pacer, 400 tokens/s per user": PacerConfig(default=400),
    "vllm-pacer, 200 tokens/s per user": PacerConfig(default=200),
}


@dataclass
class Work:
    """One request of the trace, and when its first and last token were served."""

    arrival_ns: int
    user: str
    prompt_tokens: int
    output_tokens: int
    first_ns: int = 0
    last_ns: int = 0

    @property
    def service(self) -> int:
        """What the request costs."""
        return self.prompt_tokens + 2 * self.output_tokens

    def served_in(self, begin_ns: float, end_ns: float) -> float:
        """Return the service that falls into a window."""
        lasts_ns = max(self.last_ns - self.first_ns, 1)
        part = min(self.last_ns, end_ns) - max(self.first_ns, begin_ns)
        return self.service * max(part, 0) / lasts_ns


def trace() -> list[Work]:
    """Return the requests in order of arrival."""
    with TRACE.open() as file:
        return [
            Work(
                round(float(row["arrival_s"]) * NS_PER_SECOND),
                row["user"],
                int(row["prompt_tokens"]),
                int(row["output_tokens"]),
            )
            for row in csv.DictReader(file)
        ]


def replay(scheduler: Scheduler, clock: FakeClock, counters: CounterQueue | None) -> list[Work]:
    """Serve the trace; return its requests with the time of their tokens."""
    works = {str(number): work for number, work in enumerate(trace())}
    to_come = iter(works.items())
    coming = next(to_come, None)
    left = dict(works)
    while left:
        while coming is not None and coming[1].arrival_ns <= clock.now_ns():
            scheduler.add_request(_request(*coming))
            coming = next(to_come, None)
        output = scheduler.schedule()
        if not output.total_num_scheduled_tokens:
            idle = not scheduler.has_unfinished_requests() and coming is not None
            clock.advance_ns(coming[1].arrival_ns - clock.now_ns() if idle else _NAP_NS)
            scheduler.update_from_output(output, result_of(scheduler, output))
            continue
        clock.advance_ns(STEP_NS)
        outputs = scheduler.update_from_output(output, result_of(scheduler, output))
        for each in (each for of_client in outputs.values() for each in of_client.outputs):
            work = works[each.request_id]
            if counters is not None:
                counters.charge(work.user, len(each.new_token_ids))
            work.first_ns = work.first_ns or clock.now_ns()
            if each.finish_reason is not None:
                work.last_ns = clock.now_ns()
                del left[each.request_id]
    return list(works.values())


def _request(request_id: str, work: Work) -> Request:
    params = SamplingParams(
        max_tokens=work.output_tokens,
        ignore_eos=True,
        extra_args={"output_rate_user": work.user},
    )
    params.update_from_generation_config({}, 0)
    return Request(
        request_id=request_id,
        prompt_token_ids=[TOKEN] * work.prompt_tokens,
        sampling_params=params,
        pooling_params=None,
        arrival_time=work.arrival_ns / NS_PER_SECOND,
    )


def difference(works: list[Work]) -> float:
    """Return the average service difference of the published windows."""
    users = {work.user for work in works}
    differences = []
    for begin in WINDOWS:
        begin_ns, end_ns = begin * 1e9, (begin + WINDOW_SECONDS) * 1e9
        asked = dict.fromkeys(users, 0.0)
        got = dict.fromkeys(users, 0.0)
        for work in works:
            got[work.user] += work.served_in(begin_ns, end_ns)
            if begin_ns <= work.arrival_ns < end_ns:
                asked[work.user] += work.service
        best = max(got.values())
        differences.append(
            sum(min(best - got[user], abs(asked[user] - got[user])) for user in users)
            / WINDOW_SECONDS
        )
    return mean(differences)


def in_order(name: str) -> list[Work]:
    """Replay the trace in one of the orders."""
    pacing = ORDERS[name]
    clock = FakeClock()
    scheduler = make_scheduler(pacing, clock=clock, residents=RESIDENTS, active=ACTIVE)
    counters = None
    if name == COUNTER:
        counters = scheduler.waiting = CounterQueue()
    return replay(scheduler, clock, counters)


def measure() -> dict[str, Any]:
    """Replay the trace in every order."""
    rows: list[dict[str, Any]] = []
    for name in ORDERS:
        works = in_order(name)
        tokens = sum(work.prompt_tokens + work.output_tokens for work in works)
        own = difference(works)
        first_come = rows[0]["difference"] if rows else own
        rows.append(
            {
                "order": name,
                "difference": own,
                "of_first_come": own / first_come,
                "tokens_per_second": tokens * 1e9 / max(work.last_ns for work in works),
                "finished": sum(bool(work.last_ns) for work in works),
            }
        )
    return {"step_ms": STEP_NS / 1e6, "residents": RESIDENTS, "active": ACTIVE, "replays": rows}
