"""What stands in the place of vLLM's `scheduler_cls` builds the scheduler that fits the engine."""

import logging

import pytest
from engine_bed import Bed
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import InprocClient

from vllm_pacer.clock import MonotonicClock
from vllm_pacer.config import PacerConfig
from vllm_pacer.engine.factory import PacedSchedulerFactory
from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler


@pytest.fixture(autouse=True)
def _idle_wait_for_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((EngineCoreProc, "_process_engine_step"), (InprocClient, "get_output")):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # put back at the end


def test_factory_builds_what_the_engine_needs(is_async: bool) -> None:
    """An engine core that is given the factory gets the class and the queue depth of its kind."""
    factory = PacedSchedulerFactory(PacerConfig(default=10))
    bed = Bed(is_async=is_async, scheduler_cls=factory)
    assert type(bed.scheduler) is (PacedAsyncScheduler if is_async else PacedScheduler)
    assert isinstance(bed.scheduler, AsyncScheduler) == is_async
    assert bed.core.batch_queue_size == (2 if is_async else 1)
    assert isinstance(bed.scheduler._clock, MonotonicClock)
    assert hasattr(EngineCoreProc._process_engine_step, "__wrapped__")


def test_doubtful_limits_are_logged_once(
    is_async: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's log has one warning for each thing that can hardly be meant, and no other."""
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", False)
    caplog.set_level(logging.WARNING, logger="vllm")
    for changes, words in (
        ({}, []),
        ({"burst": 0, "weights": {"a": 2}, "fairness": False}, ["weights have", "a burst of 0 s"]),
    ):
        caplog.clear()
        factory = PacedSchedulerFactory(PacerConfig(default=10, **changes))
        Bed(is_async=is_async, scheduler_cls=factory)
        warnings = [each.getMessage() for each in caplog.records if "vllm-pacer: " in each.msg]
        assert len(warnings) == len(words)
        assert all(word in each for word, each in zip(words, warnings, strict=True))
