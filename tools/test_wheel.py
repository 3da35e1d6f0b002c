"""Tests the wheel as a user gets it: installed, with no source beside it.

    python3.11 tools/test_wheel.py [WHEEL]

Without a wheel it builds one. An editable installation hides a file that the wheel forgot; here
the core's unit tests run in a folder that holds nothing but themselves.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import paths
import testbed

NOT_ABOUT_THE_PACKAGE = "tests/unit/test_docs.py"
"""It reads the repository's documentation, which no wheel carries."""


def main(arguments: list[str]) -> int:
    """Test the wheel that is named, or a new one."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = testbed.Runner(testbed.LOGS / "wheel.log")
        try:
            python = testbed.create_venv(run, folder / "venv")
            wheel = Path(arguments[0]).resolve() if arguments else build(run, python, folder)
            install = (python, "-m", "pip", "install", "-c", testbed.LOCK_FILE)
            run(*install, "--group", "test", wheel)
        except subprocess.CalledProcessError as error:
            print(f"{error}\n{run.tail()}", file=sys.stderr)
            return 1
        print(f"{wheel.name}, {wheel.stat().st_size:,} bytes", flush=True)
        return run_tests(python, folder / "tests-only")


def build(run: testbed.Runner, python: Path, folder: Path) -> Path:
    """Build the wheel of this checkout."""
    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, paths.ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run_tests(python: Path, folder: Path) -> int:
    """Run the unit tests in a copy that has no source, and return pytest's exit status."""
    shutil.copytree(paths.ROOT / "tests", folder / "tests")
    shutil.copy(paths.ROOT / "pyproject.toml", folder)
    options = ("-q", "-p", "no:cacheprovider", f"--ignore={NOT_ABOUT_THE_PACKAGE}")
    pytest = (python, "-m", "pytest", *options, "tests/unit")
    return subprocess.run(
        pytest, cwd=folder, env=paths.engine_environment(), check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
