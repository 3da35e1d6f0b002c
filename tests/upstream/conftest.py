"""The environment of the tests here, and vLLM as it was before anything was wrapped."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# The folder is no package, so its helpers are found by name; the test bed's layout is in tools/.
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tools")]


@pytest.fixture
def stock_vllm() -> Iterator[None]:
    """Start from an unwrapped vLLM, and leave one behind."""
    from own_names import wrapped_methods

    from vllm_pacer.engine.patches import unwrap

    methods = [method for method in wrapped_methods() if method[1] in vars(method[0])]
    for owner, name in methods:
        unwrap(owner, name)
    yield
    for owner, name in methods:
        unwrap(owner, name)
