"""Servers for the end-to-end tests: two configurations in each lane, each started once."""

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import pytest
import yaml
from packaging.version import Version

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tools")]

from served.server import (  # noqa: E402
    API_SERVER,
    LANES,
    VLLM_SERVE,
    Server,
    launched,
    tail,
    wait_until_ready,
)

QUEUE_LIMIT = 100
FEW_BLOCKS = 70
# A model without weights would fill its JSON with line breaks, which any schema allows.
STRUCTURED_OUTPUTS = {"backend": "xgrammar", "disable_any_whitespace": True}

WINDOW_RATES = {f"window-{rate}": rate for rate in (0.5, 1, 2, 3, 5, 8, 10, 15, 20, 30)}

DEFAULT_LIMIT = 0.01
LIMITS = {
    "free": None,
    "one-stream": 20,
    "four-streams": 20,
    "two-streams": 100,
    "texts": 150,
    **WINDOW_RATES,
}
"""Users are independent of each other, so that one server does for many tests."""

SMALL_LIMITS = {
    "default": None,
    "users": {"free": None, "a": 60, "b": 90, "c": 150},
    # Users that share the KV cache leave each other room; here requests are to be preempted.
    "fairness": "off",
}


@pytest.fixture(scope="session")
def vllm_version() -> str:
    """The version of vLLM under test: the one this Python imports."""
    # Importing vLLM would take seconds and half a gigabyte, for a name.
    package = Path(find_spec("vllm").origin).parent
    return Version(run_path(str(package / "_version.py"))["__version__"]).base_version


@pytest.fixture(scope="session", params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    """How the engine schedules: one step at a time, or two in flight."""
    return str(request.param)


@pytest.fixture(scope="session")
def servers(
    lane: str, vllm_version: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Both servers of a lane, started together."""
    folders = {name: tmp_path_factory.mktemp(f"{name}-{lane}") for name in ("roomy", "small")}
    limits = folders["small"] / "limits.yaml"
    limits.write_text(yaml.safe_dump(SMALL_LIMITS, sort_keys=False))
    with ExitStack() as stack:
        roomy = launched(
            folders["roomy"],
            vllm_version,
            lane,
            API_SERVER,
            *("--default-user-output-tokens-per-second", str(DEFAULT_LIMIT)),
            *("--user-output-tokens-per-second", json.dumps(LIMITS)),
            *("--max-num-queued-reqs", str(QUEUE_LIMIT)),
            *("--structured-outputs-config", json.dumps(STRUCTURED_OUTPUTS)),
        )
        small = launched(
            folders["small"],
            vllm_version,
            lane,
            VLLM_SERVE,
            *("--user-output-rate-config", str(limits)),
            *("--block-size", "32", "--num-gpu-blocks-override", str(FEW_BLOCKS)),
            *("--api-server-count", "2"),
            "--enable-scale-out",
        )
        running = {"roomy": stack.enter_context(roomy), "small": stack.enter_context(small)}
        for server in running.values():
            wait_until_ready(server)
        yield running


@pytest.fixture
def roomy(servers: dict[str, Server]) -> Server:
    """A server with more KV blocks than it needs; its limits come from flags."""
    return servers["roomy"]


@pytest.fixture
def small(servers: dict[str, Server]) -> Server:
    """A server with few KV blocks and two API servers; its limits come from a YAML file."""
    return servers["small"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the servers' logs beside a failure."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, server in item.funcargs.get("servers", {}).items():
            report.sections.append((f"{name} server, {server.log}", tail(server.log)))
    return report
