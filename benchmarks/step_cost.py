"""What limits add to one engine step, measured against stock on the same requests.

Stock and ours take turns step by step, so that whatever the machine does in the meantime hits
both; the figures are medians of the paired differences. Each lives in a process of its own, as an
engine does: Python specialises its bytecode for the class it meets, and two classes that take turns
in one process would undo that for each other. A step is `schedule` and `update_from_output` with a
ready-made result.
"""

import gc
import multiprocessing
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter_ns
from typing import Any, Literal

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from bed import Pacing, add_requests, make_scheduler, result_of
from vllm_pacer import PacerConfig

FAR_AWAY = PacerConfig(default=1_000_000)
UNLIMITED = PacerConfig(default=None)
PROCESS_PAIRS = 5  # where a process happens to lie in memory is worth a tenth of a microsecond
STEP_PAIRS = 200  # of each pair of processes

multiprocessing.set_forkserver_preload(["torch", "vllm.v1.core.sched.scheduler"])


class Stepper:
    """Steps a scheduler, with `depth` steps in flight.

    If `is_changing`, a request ends before every step and another of its user comes.
    """

    def __init__(self, scheduler: Scheduler, depth: int, is_changing: bool = False) -> None:
        self._scheduler = scheduler
        self._depth = depth
        self._changes = count(1_000) if is_changing else None
        self._in_flight: deque[Any] = deque()

    def step_ns(self) -> int:
        """Run one step and return how long the scheduler took."""
        if self._changes is not None and self._scheduler.running:
            oldest = self._scheduler.running[0]
            user = oldest.sampling_params.extra_args["output_rate_user"]
            self._scheduler.finish_requests(oldest.request_id, RequestStatus.FINISHED_ABORTED)
            add_requests(self._scheduler, [user], first=next(self._changes))
        start = perf_counter_ns()
        output = self._scheduler.schedule()
        taken = perf_counter_ns() - start
        self._in_flight.append((output, result_of(self._scheduler, output)))
        if len(self._in_flight) < self._depth:
            return taken
        output, result = self._in_flight.popleft()
        start = perf_counter_ns()
        self._scheduler.update_from_output(output, result)
        return taken + perf_counter_ns() - start


class RemoteStepper:
    """A `Stepper` in a process of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.recv()  # it is ready

    def step_ns(self) -> int:
        """Run two steps and return how long the second took; the first warms the caches."""
        self._connection.send(True)
        return int(self._connection.recv())


def serve(connection: Connection, pacing: Pacing, users: list[str], kw: Any) -> None:
    """Step a scheduler with one request per name in `users` whenever told to."""
    is_async, is_changing = kw.get("is_async", False), kw.pop("is_changing", False)
    scheduler = make_scheduler(pacing, **kw)
    add_requests(scheduler, users)
    stepper = Stepper(scheduler, 2 if is_async else 1, is_changing)
    for _ in range(50):
        stepper.step_ns()
    gc.collect()
    gc.disable()
    connection.send("ready")
    while connection.recv():
        stepper.step_ns()
        connection.send(stepper.step_ns())


@contextmanager
def remote(pacing: Pacing, users: list[str], **kw: Any) -> Iterator[RemoteStepper]:
    """Start a process that steps a scheduler."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, pacing, users, kw), daemon=True)
    process.start()
    try:
        yield RemoteStepper(here)
    finally:
        here.send(False)
        process.join()


Pairs = list[tuple[int, int]]
"""The steps of one scheduler and of another, in turns, in nanoseconds."""


def step_pairs(one: tuple[Pacing, list[str]], other: tuple[Pacing, list[str]], **kw: Any) -> Pairs:
    """Step both in turns, in one pair of processes."""
    pairs: Pairs = []
    with remote(*one, **kw) as first, remote(*other, **kw) as second:
        for index in range(STEP_PAIRS):
            if index % 2:
                pairs.append((first.step_ns(), second.step_ns()))
            else:
                second_ns = second.step_ns()
                pairs.append((first.step_ns(), second_ns))
    return pairs


def medians_us(pairs: Pairs) -> tuple[float, float, float]:
    """Return the median steps of both, and the median difference other − one."""
    return (
        median(each for each, _ in pairs) / 1000,
        median(each for _, each in pairs) / 1000,
        median(b - a for a, b in pairs) / 1000,
    )


def paired_us(
    one: tuple[Pacing, list[str]], other: tuple[Pacing, list[str]], **kw: Any
) -> tuple[float, float, float]:
    """Return what `medians_us` does, of several pairs of processes."""
    return medians_us([each for _ in range(PROCESS_PAIRS) for each in step_pairs(one, other, **kw)])


@dataclass(frozen=True)
class Load:
    """Requests that are scheduled, and the limits that are on and not binding."""

    requests: int
    users: int
    is_async: bool
    pacing: PacerConfig | Literal["least"]
    is_changing: bool = False

    def step_pairs(self) -> Pairs:
        """Step stock and ours in turns."""
        users = [f"user-{index % self.users}" for index in range(self.requests)]
        slots = max(self.requests, 16)
        kw = {"is_async": self.is_async, "is_changing": self.is_changing, "residents": slots}
        return step_pairs((None, users), (self.pacing, users), **kw)


def scheduled_costs() -> list[dict]:
    """Measure what limits that are on and not binding add per scheduled request.

    One pair of processes of each load after the other, and again: the machine gets faster and
    slower in the meantime, and the loads are to be compared.
    """
    loads = [
        *(
            Load(requests, users, is_async, FAR_AWAY)
            for is_async in (False, True)
            for requests, users in ((8, 1), (16, 1), (16, 16), (64, 1), (64, 64))
        ),
        Load(16, 16, False, FAR_AWAY, is_changing=True),
        Load(64, 64, False, FAR_AWAY, is_changing=True),
        Load(64, 64, False, UNLIMITED),
        *(
            Load(requests, users, is_async, "least")
            for is_async in (False, True)
            for requests, users in ((8, 1), (16, 1))
        ),
    ]
    pairs: list[Pairs] = [[] for _ in loads]
    for _ in range(PROCESS_PAIRS):
        for load, of_load in zip(loads, pairs, strict=True):
            of_load += load.step_pairs()
    rows = []
    for load, of_load in zip(loads, pairs, strict=True):
        stock_us, ours_us, added_us = medians_us(of_load)
        rows.append(
            {
                "requests": load.requests,
                "users": load.users,
                "scheduling": "async" if load.is_async else "sync",
                "changing": "one" if load.is_changing else "none",
                "limits": _name(load.pacing),
                "stock_us": stock_us,
                "ours_us": ours_us,
                "added_ns_per_request": added_us * 1000 / load.requests,
            }
        )
    return rows


def _name(pacing: PacerConfig | Literal["least"]) -> str:
    if pacing == "least":
        return "the least limiter"
    return "none" if pacing.default is None else "far away"


def paused_cost(residents: int, running: int, users: int) -> dict:
    """Measure what a paused resident adds to the step of those that run."""
    busy = [f"busy-{i}" for i in range(running)]
    paused = [f"paused-{i % users}" for i in range(residents)]
    pacing = PacerConfig(default=None, users=dict.fromkeys(paused, 0.001))
    alone_us, beside_us, added_us = paired_us(
        (pacing, busy), (pacing, [*paused, *busy]), residents=residents + running
    )
    return {
        "paused": residents,
        "paused_users": users,
        "running": running,
        "alone_us": alone_us,
        "beside_us": beside_us,
        "added_ns_per_paused": added_us * 1000 / residents,
    }


def flooded_cost(waiting: int, residents: int, running: int) -> dict:
    """Measure the step beside a flood: paused residents and requests that wait, of one user."""
    busy = [f"busy-{i}" for i in range(running)]
    flood = ["flood"] * (residents - running + waiting)
    pacing = PacerConfig(default=None, users={"flood": 0.001})
    stock_us, ours_us, added_us = paired_us(
        (None, busy), (pacing, [*busy, *flood]), residents=residents
    )
    return {
        "waiting": waiting,
        "residents": residents,
        "running": running,
        "stock_us": stock_us,
        "ours_us": ours_us,
        "ratio": (stock_us + added_us) / stock_us,
    }


def crowded_cost(waiting: int, residents: int) -> dict:
    """Measure the step in a full house for which users wait with one request each."""
    users = [f"user-{i}" for i in range(residents + waiting)]
    stock_us, ours_us, added_us = paired_us((None, users), (FAR_AWAY, users), residents=residents)
    return {
        "waiting": waiting,
        "residents": residents,
        "stock_us": stock_us,
        "ours_us": ours_us,
        "added_us": added_us,
    }


def absent_users_cost(users: int) -> dict:
    """Measure the longest step while `users` one-shot users are known and being forgotten."""
    scheduler = make_scheduler(PacerConfig(default=100), residents=16)
    now_ns = scheduler.now_ns()
    scheduler._limiter.begin_step(now_ns)
    for index in range(users):
        account = scheduler._limiter.account(f"one-shot-{index}")
        account.tat = (now_ns + 3_600_000_000_000) * 100  # not idle yet, or it would be gone
    add_requests(scheduler, [f"busy-{i}" for i in range(8)])
    few = make_scheduler(PacerConfig(default=100), residents=16)
    add_requests(few, [f"busy-{i}" for i in range(8)])
    with_users, without = Stepper(scheduler, 1), Stepper(few, 1)
    pairs = [(without.step_ns(), with_users.step_ns()) for _ in range(PROCESS_PAIRS * STEP_PAIRS)]
    return {
        "known_users": users,
        "median_added_us": median(b - a for a, b in pairs) / 1000,
        "longest_added_us": (max(b for _, b in pairs) - max(a for a, _ in pairs)) / 1000,
    }


def measure() -> dict:
    """Run all measurements."""
    return {
        "scheduled": scheduled_costs(),
        "paused": [paused_cost(990, 10, users) for users in (1, 10, 990)],
        "flooded": [flooded_cost(10_000, 1_000, 10)],
        "crowded": [crowded_cost(waiting, 64) for waiting in (100, 10_000)],
        "absent": [absent_users_cost(1_000_000)],
    }
