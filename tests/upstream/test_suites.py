"""vLLM's own scheduler suites, run on its schedulers and on ours, compared test by test.

Upstream's tests come from the test bed in the version that this interpreter imports. Each variant
is one pytest process of its own; `swap_plugin` exchanges the scheduler classes in it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest
import vllm
from packaging.version import Version

from paths import upstream

pytestmark = pytest.mark.timeout(900)

VERSION = Version(vllm.__version__).base_version

SUITES = (
    "core/test_scheduler.py",
    "core/test_async_scheduler.py",
    "core/test_priority_scheduler_random.py",
    "core/test_deferred_block_free.py",
    "core/test_worker_slot_overflow.py",
    "core/test_swa_inflight_window_free.py",
    "core/test_prefix_caching.py",
    "core/test_prefix_replay.py",
    "spec_decode/test_dynamic_sd.py",
    "streaming_input/test_scheduler_streaming.py",
    "ec_connector/unit/test_ec_transfer_params.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
    "kv_connector/unit/test_multi_connector.py",
    "kv_connector/unit/test_decode_bench_connector.py",
    "kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "kv_connector/unit/offloading_connector/test_scheduler.py",
)
"""Below `tests/v1`: those that build a scheduler and pass without a GPU, a network and Ray."""

WRITES_INTO_THE_TREE = (
    "tests/v1/kv_connector/unit/test_multi_connector.py::test_multi_example_connector_consistency"
)
"""It fails for want of a model, and leaves folders in the tree that the variants share."""

LEAST_STOCK_PASSES = {"0.32.0": 930, "0.33.0": 1048}
"""Measured without our classes; the rest need model configs that the test bed does not have."""

RATES = {"far away": "1000000", "unlimited": "null"}


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one pytest process in upstream's tree.

    Attributes:
        outcomes: What became of each test.
        schedulers: How many schedulers of ours each test built, for those that built one.
        charged_tokens: How many tokens they charged.
        log: What pytest printed.
    """

    outcomes: Mapping[str, str]
    schedulers: Mapping[str, int]
    charged_tokens: int
    log: str

    @property
    def passed(self) -> set[str]:
        """The names of the tests that passed."""
        return {name for name, outcome in self.outcomes.items() if outcome == "passed"}

    def count(self, suite: str) -> str:
        """Return how many tests of a suite passed, and of how many."""
        prefix = f"tests.v1.{suite.removesuffix('.py').replace('/', '.')}"
        own = [each for each in self.outcomes if each.startswith((f"{prefix}::", f"{prefix}."))]
        return f"{len(self.passed.intersection(own))}/{len(own)}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Run the suites stock and with each limit, as many at once as there are cores."""
    folder = tmp_path_factory.mktemp("suites")
    variants = {"stock": None, **RATES}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {
            name: pool.submit(run_suites, folder / name.replace(" ", "-"), rate)
            for name, rate in variants.items()
        }
        return {name: future.result() for name, future in futures.items()}


def run_suites(folder: Path, rate: str | None) -> Run:
    """Run upstream's suites; `rate` exchanges the schedulers, `None` leaves them stock."""
    folder.mkdir()
    results, report = folder / "results.xml", folder / "report.json"
    command = [
        *[sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir=."],
        *["-p", "no:cacheprovider", f"--junitxml={results}"],
        *["-p", "swap_plugin", f"--paced-report={report}"],
        *([f"--paced-rate={rate}"] if rate else []),
        f"--deselect={WRITES_INTO_THE_TREE}",
        *[f"tests/v1/{suite}" for suite in SUITES],
    ]
    process = subprocess.run(
        command,
        cwd=upstream(VERSION),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # 1 says that tests failed, which is the comparison's business; all else is no result.
    assert process.returncode in (0, 1), process.stdout[-4000:]
    return Run(read_outcomes(results), **json.loads(report.read_text()), log=process.stdout)


def environment() -> dict[str, str]:
    """Return this process's environment, with the plugin importable and the network left alone."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    own = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    return {**own, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def read_outcomes(results: Path) -> dict[str, str]:
    """Return the outcome of each test in a JUnit file."""
    outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = bad.pop() if bad else "passed"
    return outcomes


def test_the_stock_baseline_is_not_empty(runs: dict[str, Run]) -> None:
    """Without our classes as many of upstream's tests pass as when the baseline was measured."""
    stock = runs["stock"]
    print(f"vLLM {VERSION}, stock: {len(stock.passed)} of {len(stock.outcomes)} pass")
    assert len(stock.passed) >= LEAST_STOCK_PASSES[VERSION], stock.log[-4000:]


@pytest.mark.parametrize("variant", RATES)
def test_no_test_that_passes_on_stock_is_lost(runs: dict[str, Run], variant: str) -> None:
    """Every test that passes on vLLM's schedulers passes on ours, with limits that do not bind."""
    stock, ours = runs["stock"], runs[variant]
    print(
        f"vLLM {VERSION}, {variant}: {len(ours.passed)} of {len(ours.outcomes)} pass, "
        f"{len(stock.passed - ours.passed)} lost, {len(ours.passed - stock.passed)} gained; "
        f"{sum(ours.schedulers.values())} schedulers in {len(ours.schedulers)} tests charged "
        f"{ours.charged_tokens} tokens"
    )
    for suite in SUITES:
        print(f"  {suite}: stock {stock.count(suite)}, ours {ours.count(suite)}")
    assert ours.outcomes.keys() == stock.outcomes.keys()
    assert sorted(stock.passed - ours.passed) == [], ours.log[-8000:]


@pytest.mark.parametrize("variant", RATES)
def test_the_suites_did_run_on_our_schedulers(runs: dict[str, Run], variant: str) -> None:
    """The comparison says something: each suite that passes something built a scheduler of ours."""
    ours = runs[variant]
    assert not runs["stock"].schedulers
    built = {test.partition(".py::")[0].replace("/", ".") for test in ours.schedulers}
    assert {name.partition("::")[0] for name in ours.passed if ".Test" not in name} <= built
    assert len(ours.schedulers) > len(ours.passed) / 3
    assert ours.charged_tokens > sum(ours.schedulers.values())
