"""Servers for the end-to-end tests: two configurations in each lane, each started once."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tools")]

from served.server import LANES, Server, launched, tail, wait_until_ready  # noqa: E402

LIMITS = """\
# Users are independent of each other, so that one server does for many tests.
default: 0.01
users:
  free: null
  one-stream: 20
  four-streams: 20
  two-streams: 100
"""

SMALL_LIMITS = '{"free": null, "a": 60, "b": 90, "c": 150}'


@pytest.fixture(scope="session")
def vllm_version() -> str:
    """The version of vLLM under test: the one this Python imports."""
    import vllm
    from packaging.version import Version

    return Version(vllm.__version__).base_version


@pytest.fixture(scope="session", params=LANES)
def lane(request: pytest.FixtureRequest) -> str:
    """How the engine schedules: one step at a time, or two in flight."""
    return str(request.param)


@pytest.fixture(scope="session")
def servers(
    lane: str, vllm_version: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Server]]:
    """Both servers of a lane, started together."""
    folder = tmp_path_factory.mktemp(f"roomy-{lane}")
    limits = folder / "limits.yaml"
    limits.write_text(LIMITS)
    with ExitStack() as stack:
        roomy = launched(
            folder,
            vllm_version,
            lane,
            *("--user-output-rate-config", str(limits), "--max-num-queued-reqs", "100"),
            start_at_once=False,
        )
        running = {"roomy": stack.enter_context(roomy)}
        for server in running.values():
            wait_until_ready(server)
        yield running


@pytest.fixture
def roomy(servers: dict[str, Server], request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with more KV blocks than it needs, its limits from a YAML file."""
    yield from _shown_on_failure(servers["roomy"], request)


def _shown_on_failure(server: Server, request: pytest.FixtureRequest) -> Iterator[Server]:
    start = server.log.stat().st_size
    yield server
    outcome: Any = request.node.stash.get(OUTCOME, None)
    if outcome is not None and outcome.failed:
        print(f"--- {server.log}\n{tail(server.log, max(server.log.stat().st_size - start, 4000))}")


OUTCOME = pytest.StashKey[Any]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: object) -> Any:
    """Keep the outcome where fixtures find it."""
    report = yield
    if report.when == "call":
        item.stash[OUTCOME] = report
    return report
