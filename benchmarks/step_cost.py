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
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter_ns
from typing import Any, Literal

from vllm.v1.core.sched.scheduler import Scheduler

from bed import Pacing, add_requests, make_scheduler, result_of
from vllm_pacer import PacerConfig

FAR_AWAY = PacerConfig(default=1_000_000)
UNLIMITED = PacerConfig(default=None)
PROCESS_PAIRS = 4  # where a process happens to lie in memory is worth a tenth of a microsecond
STEP_PAIRS = 300  # of each pair of processes

multiprocessing.set_forkserver_preload(["torch", "vllm.v1.core.sched.scheduler"])


class Stepper:
    """Steps a scheduler, with `depth` steps in flight."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self._scheduler = scheduler
        self._depth = depth
        self._in_flight: deque[Any] = deque()

    def step_ns(self) -> int:
        """Run one step and return how long the scheduler took."""
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
    is_async = kw.get("is_async", False)
    scheduler = make_scheduler(pacing, **kw)
    add_requests(scheduler, users)
    stepper = Stepper(scheduler, 2 if is_async else 1)
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


def paired_us(
    one: tuple[Pacing, list[str]],
    other: tuple[Pacing, list[str]],
    **kw: Any,
) -> tuple[float, float, float]:
    """Return the median steps of both, and the median difference other − one."""
    pairs: list[tuple[int, int]] = []
    for _ in range(PROCESS_PAIRS):
        with remote(*one, **kw) as first, remote(*other, **kw) as second:
            for index in range(STEP_PAIRS):
                if index % 2:
                    pairs.append((first.step_ns(), second.step_ns()))
                else:
                    second_ns = second.step_ns()
                    pairs.append((first.step_ns(), second_ns))
    return (
        median(each for each, _ in pairs) / 1000,
        median(each for _, each in pairs) / 1000,
        median(b - a for a, b in pairs) / 1000,
    )


def scheduled_cost(
    requests: int, one_user: bool, is_async: bool, pacing: PacerConfig | Literal["least"]
) -> dict:
    """Measure what limits that are on and not binding add per scheduled request."""
    users = ["user"] * requests if one_user else [f"user-{i}" for i in range(requests)]
    stock_us, ours_us, added_us = paired_us(
        (None, users), (pacing, users), is_async=is_async, residents=max(requests, 16)
    )
    return {
        "requests": requests,
        "users": 1 if one_user else requests,
        "scheduling": "async" if is_async else "sync",
        "limits": _name(pacing),
        "stock_us": stock_us,
        "ours_us": ours_us,
        "added_ns_per_request": added_us * 1000 / requests,
    }


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
        "scheduled": [
            *(
                scheduled_cost(requests, one_user, is_async, FAR_AWAY)
                for is_async in (False, True)
                for requests, one_user in (
                    (8, True),
                    (16, True),
                    (16, False),
                    (64, True),
                    (64, False),
                )
            ),
            scheduled_cost(64, False, False, UNLIMITED),
            *(
                scheduled_cost(requests, one_user, is_async, "least")
                for is_async in (False, True)
                for requests, one_user in ((8, True), (16, False), (64, False))
            ),
        ],
        "paused": [paused_cost(990, 10, users) for users in (1, 10, 990)],
        "flooded": [flooded_cost(10_000, 1_000, 10)],
        "crowded": [crowded_cost(waiting, 64) for waiting in (100, 10_000)],
        "absent": [absent_users_cost(1_000_000)],
    }
