"""What the modules import, what the package exports, and that its examples are true."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_pacer

PACKAGE = Path(vllm_pacer.__file__).parent
ROOMS = (
    "clock",
    "quota",
    "limiter",
    "charges",
    "fairness",
    "positions",
    "adapters",
    "wake_ups",
    "pauses",
    "lines",
    "config",
    "__main__",
)
"""The pure modules; each may import those before it."""

THIRD_PARTY = {"config": {"yaml", "pydantic"}}
IMPURE = {"time", "datetime", "logging", "random", "threading", "asyncio", "os", "sys"}


def imports_of(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.add(node.module or "")
    return names


def test_every_module_has_its_room() -> None:
    """A new module beside the pure ones has to be given its place in this list."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ROOMS, "__init__"}


@pytest.mark.parametrize("room", ROOMS)
def test_the_core_is_pure(room: str) -> None:
    """A pure module imports modules before it and the standard library: no vLLM, no time."""
    imported = imports_of(PACKAGE / f"{room}.py")
    own = {name for name in imported if name.split(".")[0] == "vllm_pacer"}
    others = {name.split(".")[0] for name in imported - own}
    before = {f"vllm_pacer.{earlier}" for earlier in ROOMS[: ROOMS.index(room)]}
    assert own <= before | ({"vllm_pacer"} if room == "__main__" else set())  # its version
    assert others <= sys.stdlib_module_names | THIRD_PARTY.get(room, set())
    assert others & IMPURE == {"clock": {"time"}, "__main__": {"os", "sys"}}.get(room, set())


def test_only_the_engine_folder_imports_vllm() -> None:
    """Nothing outside `engine/` imports vLLM, not even inside a function."""
    outside = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "engine" not in path.parents]
    assert outside
    for path in outside:
        assert not {name for name in imports_of(path) if name.split(".")[0] == "vllm"}, path


def test_only_the_clock_reads_time() -> None:
    """Whatever else imports `time` uses it to sleep."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        uses = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "time"
        }
        assert uses <= ({"monotonic_ns"} if path.name == "clock.py" else {"sleep"}), path
        assert "datetime" not in imports_of(path), path
        assert not [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "time"
        ], path


def test_importing_the_package_does_not_import_vllm() -> None:
    """`import vllm_pacer` loads neither vLLM nor the part of the package that needs it."""
    code = (
        "import sys, vllm_pacer;"
        "print([name for name in sys.modules"
        " if name.split('.')[0] in ('vllm', 'torch') or name.startswith('vllm_pacer.engine')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_exports() -> None:
    """`__all__` is sorted and is what is public, each with a docstring of its own."""
    exported = vllm_pacer.__all__
    assert exported == sorted(exported)
    public = {
        name
        for name, value in vars(vllm_pacer).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("vllm_pacer")
    }
    assert public == set(exported)
    assert all(getattr(vllm_pacer, name).__doc__ for name in exported)
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", ["", *(f".{room}" for room in ROOMS)])
def test_the_examples_in_docstrings(name: str) -> None:
    """Every example in a docstring gives what it says."""
    module = importlib.import_module(f"vllm_pacer{name}")
    results = doctest.testmod(module)
    assert results.failed == 0


def test_there_are_examples() -> None:
    """The core is explained by examples, which the test above runs."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("limiter", "quota", "fairness", "positions"):
        module = importlib.import_module(f"vllm_pacer.{name}")
        assert [each for each in finder.find(module) if each.examples]
