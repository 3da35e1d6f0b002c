"""Settings that vLLM reads when it is imported, and the two ways an engine can schedule."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# The folder is no package, so its helper modules are found by name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    """Whether steps overlap: vLLM's own two engine loops, the second at depth 2."""
    return request.param


@pytest.fixture(autouse=True)
def _leave_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep an engine core from freezing the garbage collector and caching the environment."""
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "freeze_gc_heap", lambda: None)
    monkeypatch.setattr(core, "enable_envs_cache", lambda: None)
