"""A pytest plugin that runs vLLM's own scheduler tests on this package's schedulers.

Loaded with `-p swap_plugin` in upstream's tree. It exchanges the two names in vLLM's modules before
any test module or conftest imports them, so tests and their helpers build ours without a change.

What it cannot see: a test that makes its scheduler from `DiffusionScheduler`, or calls a method of
the class on a stub, goes on running vLLM's code.
"""

import json
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pacer.config import make_config
from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler

_MODULES = {
    "Scheduler": "vllm.v1.core.sched.scheduler",
    "AsyncScheduler": "vllm.v1.core.sched.async_scheduler",
}
# These derive from the two or name them; they are to keep vLLM's.
_USERS_OF_STOCK = (
    "vllm.v1.core.sched.diffusion_scheduler",
    "vllm.v1.fault_tolerance.engine_core_sentinel",
)

_counts: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose the limit and the place of the report."""
    parser.addoption("--paced-rate", help="tokens per second of every user, or null")
    parser.addoption("--paced-report", help="file for the counts that prove the exchange")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Exchange the classes before the first conftest can import them."""
    for name in _USERS_OF_STOCK:
        import_module(name)
    rate = json.loads(early_config.known_args_namespace.paced_rate)
    pacing = make_config({"default": rate}, "--paced-rate")
    for name, ours in ("Scheduler", PacedScheduler), ("AsyncScheduler", PacedAsyncScheduler):
        setattr(import_module(_MODULES[name]), name, _with_limits(ours, pacing))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write down how many of our schedulers ran and how many tokens they charged."""
    Path(session.config.getoption("--paced-report")).write_text(json.dumps(_counts))


def _with_limits(ours: type[PacedScheduler], pacing: Any) -> type[PacedScheduler]:
    """Return a class that is built like vLLM's, without naming limits."""

    class WithLimits(ours):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, pacing=pacing, **kwargs)
            _counts["schedulers"] += 1

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            charged_before = self._ledger.charged_tokens
            output = super().schedule(*args, **kwargs)
            _counts["charged_tokens"] += self._ledger.charged_tokens - charged_before
            return output

    WithLimits.__name__ = WithLimits.__qualname__ = ours.__name__
    return WithLimits
