"""Where the test bed keeps things, and the environment a vLLM process needs there.

This is the one place that knows the layout of ``.testbed/``. Tests, benchmarks and the demo ask
here instead of spelling a path of their own.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTBED = ROOT / ".testbed"

ENGINE_VERSION = "0.32.0"
"""The vLLM installed in the virtual environment, with its CPU kernels."""

OVERLAY_VERSION = "0.33.0"
"""The vLLM whose Python side is laid over the installed one by ``PYTHONPATH``."""

VLLM_VERSIONS = (ENGINE_VERSION, OVERLAY_VERSION)

VENV = TESTBED / "venv"
LIGHT_VENV = TESTBED / "lint"
PYTHON = VENV / "bin" / "python"
LIGHT_PYTHON = LIGHT_VENV / "bin" / "python"
OVERLAY = TESTBED / f"vllm-{OVERLAY_VERSION}"
REPORTS = TESTBED / "reports"

MODELS = TESTBED / "models"
TINY_LLAMA = MODELS / "tiny-llama"
"""Two layers and no weights: serve it with ``--load-format dummy``."""
SMOLLM2 = MODELS / "smollm2"
"""SmolLM2-135M-Instruct, which writes real English."""


def upstream(version: str) -> Path:
    """Return the folder that holds vLLM's own ``tests/`` of a version.

    Run upstream's tests with this as the working directory: their imports start at ``tests`` and
    the model they name, ``facebook/opt-125m``, is a folder here.
    """
    return TESTBED / "upstream" / version


def engine_environment(version: str = ENGINE_VERSION) -> dict[str, str]:
    """Return the environment in which ``PYTHON`` imports this version of vLLM, offline and quiet.

    What the caller's shell says about vLLM or Python's path is dropped, so that a test run does
    not depend on who starts it.
    """
    if version not in VLLM_VERSIONS:
        raise ValueError(
            f"vLLM {version} is not in the test bed; it has {', '.join(VLLM_VERSIONS)}"
        )
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("VLLM_")
    }
    environment |= {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # GiB. Otherwise an engine claims 92 % of the memory, and does not start if less is free.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if version == OVERLAY_VERSION:
        environment["PYTHONPATH"] = str(OVERLAY)
    return environment
