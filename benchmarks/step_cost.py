"""What limits add to one engine step, measured against stock on the same requests.

Stock and ours take turns step by step, so that whatever the machine does in the meantime hits
both; the figures are medians of the paired differences. A step is `schedule` and
`update_from_output` with a ready-made result.
"""

import gc
import json
from collections import deque
from statistics import median
from time import perf_counter_ns
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from bed import add_requests, make_scheduler, result_of
from vllm_pacer import PacerConfig

FAR_AWAY = PacerConfig(default=1_000_000)
UNLIMITED = PacerConfig(default=None)
STEPS = 1_500


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


def paired_ns(first: Stepper, second: Stepper, steps: int) -> tuple[float, float, float]:
    """Return the medians of first, second and second − first."""
    for _ in range(20):
        first.step_ns()
        second.step_ns()
    gc.collect()
    gc.disable()
    pairs = []
    for index in range(steps):
        if index % 2:
            pairs.append((first.step_ns(), second.step_ns()))
        else:
            other = second.step_ns()
            pairs.append((first.step_ns(), other))
    gc.enable()
    return (
        median(each for each, _ in pairs),
        median(each for _, each in pairs),
        median(b - a for a, b in pairs),
    )


def scheduled_cost(requests: int, one_user: bool, is_async: bool, pacing: PacerConfig) -> dict:
    """Measure what limits that are on and not binding add per scheduled request."""
    users = ["user"] * requests if one_user else [f"user-{i}" for i in range(requests)]
    steppers = []
    for each in (None, pacing):
        scheduler = make_scheduler(each, is_async=is_async, residents=max(requests, 16))
        add_requests(scheduler, users)
        steppers.append(Stepper(scheduler, 2 if is_async else 1))
    stock, ours, added = paired_ns(*steppers, STEPS)
    return {
        "requests": requests,
        "users": 1 if one_user else requests,
        "scheduling": "async" if is_async else "sync",
        "limited": pacing.default is not None,
        "stock_us": stock / 1000,
        "ours_us": ours / 1000,
        "added_ns_per_request": added / requests,
    }


def paused_cost(residents: int, running: int, users: int) -> dict:
    """Measure what a paused resident adds to the step of those that run."""
    busy = [f"busy-{i}" for i in range(running)]
    paused = [f"paused-{i % users}" for i in range(residents)]
    slow = dict.fromkeys(set(paused), 0.001)
    pacing = PacerConfig(default=None, users=slow)
    steppers = []
    for names in (busy, [*paused, *busy]):
        scheduler = make_scheduler(pacing, residents=residents + running, active=None)
        add_requests(scheduler, names)
        steppers.append(Stepper(scheduler, 1))
    alone, beside, added = paired_ns(*steppers, STEPS)
    return {
        "paused": residents,
        "paused_users": users,
        "running": running,
        "alone_us": alone / 1000,
        "beside_us": beside / 1000,
        "added_ns_per_paused": added / residents,
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
    pairs = [(without.step_ns(), with_users.step_ns()) for _ in range(STEPS)]
    return {
        "known_users": users,
        "median_added_us": median(b - a for a, b in pairs) / 1000,
        "longest_added_us": (max(b for _, b in pairs) - max(a for a, _ in pairs)) / 1000,
    }


def measure() -> dict:
    """Run all measurements."""
    return {
        "scheduled": [
            scheduled_cost(requests, one_user, is_async, pacing)
            for is_async in (False, True)
            for requests, one_user in ((8, True), (64, True), (64, False), (256, False))
            for pacing in (FAR_AWAY, UNLIMITED)
        ],
        "paused": [paused_cost(990, 10, users) for users in (1, 10, 990)],
        "absent": [absent_users_cost(1_000_000)],
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
