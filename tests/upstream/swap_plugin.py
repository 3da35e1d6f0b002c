"""A pytest plugin that runs vLLM's own scheduler tests on this package's schedulers.

Loaded with `-p swap_plugin` in upstream's tree. Given a rate it exchanges two names in vLLM's
modules before any test module or conftest imports them, so tests and their helpers build our
schedulers without a change. Without one it leaves vLLM's: the run to compare with.

What it cannot see: a test that makes its scheduler from `DiffusionScheduler`, or calls a method of
the class on a stub, goes on running vLLM's code.
"""

import json
import os
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_pacer.config import make_config
from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler

# These derive from the two or name them; they are to keep vLLM's.
_USERS_OF_STOCK = (
    "vllm.v1.core.sched.diffusion_scheduler",
    "vllm.v1.fault_tolerance.engine_core_sentinel",
)

_STAND_INS = {
    "num_spec_tokens": 0,
    "lora_config": None,
    "max_model_len": 100,
    "max_num_active_reqs": 1,
    "max_num_running_reqs": 1,
    "policy": SchedulingPolicy.FCFS,
}
"""What ours needs of vLLM's scheduler, for the tests that build one without `__init__`."""

_schedulers: Counter[str] = Counter()
_charged = Counter(tokens=0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose the limit and the place of the report."""
    parser.addoption("--paced-rate", help="tokens per second of every user, or null for no limit")
    parser.addoption("--paced-report", help="file for the counts that prove the exchange")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Exchange the classes before the first conftest can import them."""
    rate = early_config.known_args_namespace.paced_rate
    if rate is None:
        return
    for module in filter(find_spec, _USERS_OF_STOCK):
        import_module(module)
    pacing = make_config({"default": json.loads(rate)}, "--paced-rate")
    for stock, ours in (Scheduler, PacedScheduler), (AsyncScheduler, PacedAsyncScheduler):
        setattr(import_module(stock.__module__), stock.__name__, _with_limits(ours, pacing))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out upstream's clean-up of GPUs and process groups: nine tenths of the time here."""
    for item in items:
        item.add_marker("skip_global_cleanup")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down how many of our schedulers each test built and how many tokens they charged."""
    report = {"schedulers": _schedulers, "charged_tokens": _charged["tokens"]}
    Path(session.config.getoption("--paced-report")).write_text(json.dumps(report))


def _with_limits(ours: type[PacedScheduler], pacing: Any) -> type[PacedScheduler]:
    """Return a class that is built like vLLM's, without naming limits."""

    class WithLimits(ours):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, pacing=pacing, **kwargs)
            # pytest keeps the running test there, with the phase behind a space.
            _schedulers[os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]] += 1

        def __getattr__(self, name: str) -> Any:
            # Two of upstream's tests build a scheduler without `__init__` and set by hand what
            # they need of vLLM's; ours is set here when it is first asked for.
            if name != "_pauses":
                raise AttributeError(name, name=name, obj=self)
            for needed, value in _STAND_INS.items():
                if needed not in vars(self):
                    setattr(self, needed, value)
            with (
                patch.object(Scheduler, "__init__"),
                patch.object(AsyncScheduler, "__init__"),
                patch("vllm_pacer.engine.admission.check_scheduler_attributes"),
                patch.object(ours, "_block_groups", return_value=[]),
                patch.object(ours, "_draft_reach_tokens", return_value=0),
            ):
                ours.__init__(self, pacing=pacing)
            return self._pauses

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            charged_before = self._ledger.charged_tokens
            output = super().schedule(*args, **kwargs)
            _charged["tokens"] += self._ledger.charged_tokens - charged_before
            return output

    WithLimits.__name__ = WithLimits.__qualname__ = ours.__name__
    return WithLimits
