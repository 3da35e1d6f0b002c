"""Runs the levels of the test suite, each in a process of its own, and sums them up.

    python3.11 tools/run_tests.py [check|all]

``check`` is what every commit has to pass: formatting, lint, types, the tests of the core. It
needs no vLLM. ``all`` makes the whole test bed and adds the built wheel, and the levels that need
vLLM on each supported version. Every level runs, whatever became of the one before; a level that
failed makes the exit status 1.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import paths
import testbed

SIDE_BY_SIDE = 2
"""Levels at a time, one for each core of the smallest machine that CI has."""

PATIENCE_SECONDS = 30
COUNTED = ("passed", "failed", "skipped")


@dataclass(frozen=True)
class Level:
    """One process of the suite.

    Attributes:
        name: What the headings and the summary call it.
        command: What it runs.
        version: The vLLM that its environment imports.
        places: The folders or files of its tests; none for a linter.
        is_timed: Measures time, so nothing else may run meanwhile.
        seconds_allowed: It is stopped after that.
    """

    name: str
    command: tuple[str | Path, ...]
    version: str = paths.ENGINE_VERSION
    places: tuple[str, ...] = ()
    is_timed: bool = False
    seconds_allowed: float = 1500

    @property
    def log(self) -> Path:
        """The file that gets what it prints."""
        return paths.REPORTS / f"{self.name}.log"

    @property
    def report(self) -> Path:
        """The file in which pytest leaves its counts."""
        return paths.REPORTS / f"{self.name}.xml"

    def has_no_tests(self) -> bool:
        """Return whether this level should have tests and there are none."""
        return bool(self.places) and not any(map(_has_tests, self.places))


def _has_tests(place: str) -> bool:
    path = paths.ROOT / place
    return path.is_file() or any(path.rglob("test_*.py"))


@dataclass(frozen=True)
class Result:
    """What became of a level."""

    level: Level
    verdict: str
    seconds: float = 0.0
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether the suite may pass."""
        return self.verdict in ("passed", "no tests")


def linter(name: str, *command: str) -> Level:
    """Return a level that runs a module of the light environment."""
    return Level(name, (paths.LIGHT_PYTHON, "-m", *command), seconds_allowed=300)


def pytest_level(
    name: str,
    *places: str,
    python: Path = paths.PYTHON,
    version: str = paths.ENGINE_VERSION,
    is_timed: bool = False,
) -> Level:
    """Return a level that runs pytest on folders or files."""
    cache = paths.TESTBED / "pytest" / name  # levels that run side by side must not share one
    report = paths.REPORTS / f"{name}.xml"
    options = ("-q", f"--junitxml={report}", "-o", f"cache_dir={cache}")
    command: tuple[str | Path, ...] = (python, "-m", "pytest", *options, *places)
    return Level(name, command, version, places, is_timed)


CHECK = (
    linter("format", "ruff", "format", "--check", "."),
    linter("lint", "ruff", "check", "."),
    linter("types", "mypy"),
    pytest_level("core", "tests/unit", "tests/laws", python=paths.LIGHT_PYTHON),
)


WHEEL = Level("wheel", (sys.executable, paths.ROOT / "tools" / "test_wheel.py"))


SERVED_ON_EVERY_VERSION = ("tests/e2e/test_lanes.py", "tests/e2e/test_rates.py")
"""What shows that the server works; what is beyond that works the same on all of them."""


def engine_levels() -> tuple[Level, ...]:
    """Return the levels that need vLLM: on every supported version, but most of what serves."""
    return (
        *(
            pytest_level(f"{kind}-{version}", f"tests/{kind}", version=version)
            for kind in ("engine", "upstream")
            for version in paths.VLLM_VERSIONS
        ),
        pytest_level(f"e2e-{paths.ENGINE_VERSION}", "tests/e2e", is_timed=True),
        *(
            pytest_level(f"e2e-{version}", *SERVED_ON_EVERY_VERSION, version=version, is_timed=True)
            for version in paths.VLLM_VERSIONS
            if version != paths.ENGINE_VERSION
        ),
    )


def run_level(level: Level) -> Result:
    """Run a level and print what it printed, under a heading."""
    if level.has_no_tests():
        return Result(level, "no tests")
    say(f"running {level.name}")
    level.report.unlink(missing_ok=True)
    start = time.monotonic()
    verdict = run_to_log(level)
    result = Result(level, verdict, time.monotonic() - start, read_counts(level.report))
    heading = f"===== {level.name}: {verdict} after {result.seconds:.0f} s ====="
    say(f"\n{heading}\n{level.log.read_text(errors='replace')}")
    return result


def say(text: str) -> None:
    """Print in one piece, since levels that run side by side take turns."""
    print(f"{text}\n", end="", flush=True)


def run_to_log(level: Level) -> str:
    """Run a level's command with its output in the log, and return the verdict."""
    with level.log.open("w") as log:
        process = subprocess.Popen(
            level.command,
            cwd=paths.ROOT,
            env=paths.engine_environment(level.version),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return "passed" if process.wait(level.seconds_allowed) == 0 else "failed"
        except subprocess.TimeoutExpired:
            stop(process)
            return "timed out"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process as Ctrl-C would, so that it stops the servers it started, or else at once."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def read_counts(report: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped; nothing if there is no report."""
    if not report.exists():
        return {}
    totals: Counter[str] = Counter()
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        totals.update({key: int(suite.get(key, 0)) for key in ("tests", "skipped")})
        totals["failed"] += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    passed = totals["tests"] - totals["failed"] - totals["skipped"]
    return {"passed": passed, "failed": totals["failed"], "skipped": totals["skipped"]}


def run_all(levels: Iterable[Level]) -> list[Result]:
    """Run the levels: first those that may share the machine, then the timed ones."""
    levels = list(levels)
    paths.REPORTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        results = list(pool.map(run_level, [level for level in levels if not level.is_timed]))
    return results + [run_level(level) for level in levels if level.is_timed]


def summary(results: list[Result]) -> str:
    """Return a table of the levels, closed by the number of tests."""
    lines = [f"{'level':<18}{'result':<12}{'seconds':>8}" + "".join(f"{c:>9}" for c in COUNTED)]
    for result in results:
        counts = "".join(f"{result.counts.get(key, ''):>9}" for key in COUNTED)
        lines.append(f"{result.level.name:<18}{result.verdict:<12}{result.seconds:>8.1f}{counts}")
    total: Counter[str] = Counter()
    for result in results:
        total.update(result.counts)
    lines += ["", "tests: " + ", ".join(f"{total[key]} {key}" for key in COUNTED)]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Make what the levels need, run them, and say how they went."""
    parser = argparse.ArgumentParser(description="Run the test suite.")
    parser.add_argument("what", nargs="?", choices=["check", "all"], default="all")
    is_check = parser.parse_args(arguments).what == "check"
    if testbed.main(["lint" if is_check else "all"]) != 0:
        return 1
    results = run_all(CHECK if is_check else (*CHECK, WHEEL, *engine_levels()))
    print(f"\n{summary(results)}", flush=True)
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
