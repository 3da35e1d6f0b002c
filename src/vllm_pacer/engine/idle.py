"""Waiting while every request is paused, instead of asking the scheduler a thousand times a second.

The engine's loop waits where it takes its requests from, so a new request, an abort or a shutdown
ends the wait at once. It waits only when the scheduler says that a step would compute nothing
before a certain instant, and never on a rank that must keep step with others.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import InprocClient

from vllm_pacer.clock import NS_PER_SECOND
from vllm_pacer.engine.patches import wrap
from vllm_pacer.engine.scheduler import PacedScheduler

try:
    from vllm.utils.watch_dog import get_watch_dog
except ImportError:  # before vLLM 0.33
    get_watch_dog = None

LONGEST_WAIT_NS = 50_000_000


def install_idle_wait() -> None:
    """Let vLLM's two engine loops wait."""
    wrap(EngineCoreProc, "_process_engine_step", _step_after_wait)
    wrap(InprocClient, "get_output", _output_after_wait)


def _step_after_wait(step: Callable[[Any], bool], engine: EngineCoreProc) -> bool:
    wait_ns = _wait_ns(engine)
    if wait_ns <= 0:
        return step(engine)
    try:
        request = engine.input_queue.get(timeout=wait_ns / NS_PER_SECOND)
    except queue.Empty:
        # An empty step would be sent to the workers too, which spin for a while after each.
        if _wait_ns(engine) <= 0:
            return step(engine)
        if get_watch_dog is not None:
            get_watch_dog().feed()
    else:
        engine._handle_client_request(*request)
    return False


def _output_after_wait(get_output: Callable[[Any], Any], client: InprocClient) -> Any:
    wait_ns = _wait_ns(client.engine_core)
    if wait_ns > 0:
        time.sleep(wait_ns / NS_PER_SECOND)
        if _wait_ns(client.engine_core) > 0:
            return EngineCoreOutputs()
    return get_output(client)


def _wait_ns(engine: Any) -> int:
    scheduler = engine.scheduler
    if (
        not isinstance(scheduler, PacedScheduler)
        or engine.vllm_config.parallel_config.data_parallel_size > 1
    ):
        return 0
    until_ns = scheduler.quiet_until_ns()
    return min(until_ns - scheduler.now_ns(), LONGEST_WAIT_NS) if until_ns is not None else 0
