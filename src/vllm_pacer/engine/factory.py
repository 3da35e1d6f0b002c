"""Takes the limits from the command line's process to the engine's.

vLLM pickles its configuration on the way and asks `scheduler_cls` for a scheduler when the engine
is built. An object that is called like a class can decide only then between the synchronous and
the asynchronous scheduler, which is not settled before; and since `scheduler_cls` is no part of
vLLM's configuration hash, a change of limits does not invalidate compiled graphs.
"""

import logging
from pathlib import Path
from typing import Any

from vllm_pacer.config import PacerConfig

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures the loggers below its own name


class PacedSchedulerFactory:
    """Builds the scheduler; stands in the place of vLLM's `scheduler_cls`.

    Attributes:
        pacing: The limits.
        snapshot_path: Where the engine leaves its counters, if anybody reads them.
    """

    def __init__(self, pacing: PacerConfig, snapshot_path: Path | None = None) -> None:
        self.pacing = pacing
        self.snapshot_path = snapshot_path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the scheduler that fits the engine's configuration, in the engine's process."""
        # Imported here, since only the engine's process needs vLLM's schedulers.
        from vllm_pacer.engine.seams import check_seams, vllm_imports
        from vllm_pacer.engine.snapshot import SnapshotWriter

        check_seams()
        with vllm_imports():
            from vllm_pacer.engine.idle import install_idle_wait
            from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler
        is_async = kwargs["vllm_config"].scheduler_config.async_scheduling
        scheduler_cls = PacedAsyncScheduler if is_async else PacedScheduler
        snapshot = SnapshotWriter(self.snapshot_path) if self.snapshot_path else None
        scheduler = scheduler_cls(*args, pacing=self.pacing, snapshot=snapshot, **kwargs)
        install_idle_wait()
        scheduler.log_limits()
        for warning in self.pacing.warnings():
            logger.warning("vllm-pacer: %s.", warning)
        return scheduler

    def __str__(self) -> str:
        return "vllm_pacer.PacedScheduler"
