"""What this package takes from vLLM is listed, collides with nothing, and is no copied body."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import vllm
from own_names import ENGINE_FILES, PACKAGE, listed_names, own_names, unlisted_names, wrap_calls
from upstream_source import module_tree
from vllm.v1.core.sched import async_scheduler as async_scheduler_module
from vllm.v1.core.sched import scheduler as scheduler_module

from vllm_pacer.engine.scheduler import PacedAsyncScheduler, PacedScheduler
from vllm_pacer.engine.seams import SEAMS

# Its rows read configuration fields; each row is run on vLLM's configuration in another test.
SCANNED_FILES = [path for path in ENGINE_FILES if path.name != "refusals.py"]

OWN_NAMES = own_names(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


# --- the scan -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCANNED_FILES, ids=lambda path: path.name)
def test_every_name_of_vllms_is_listed(path: Path) -> None:
    """A name that is neither ours nor Python's stands in the tables of `seams`."""
    assert unlisted_names(path.read_text(), OWN_NAMES, listed_names()) == set()


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("self._inflight_prefills.add(request)", "_inflight_prefills"),
        ("self.deferred_waiting.discard(request)", "deferred_waiting"),
        ("request.num_nans_in_logits += 1", "num_nans_in_logits"),
        ("self.kv_cache_manager.prefix_cache_stats", "prefix_cache_stats"),
        ("super()._update_after_schedule(output)", "_update_after_schedule"),
        ("engine._process_input_queue()", "_process_input_queue"),
        ("getattr(self, '_inflight_prefills')", "_inflight_prefills"),
        ("wrap(EngineCoreProc, 'post_step', around)", "post_step"),
        ("from vllm.v1.core.sched.scheduler import _private", "_private"),
        ("from vllm._custom_ops import public", "_custom_ops"),
    ],
)
def test_the_scan_finds_an_unlisted_name(line: str, name: str) -> None:
    """Using a name of vLLM's that no table lists makes the scan fail."""
    assert unlisted_names(line, OWN_NAMES, listed_names()) == {name}


@pytest.mark.parametrize(
    "line",
    [
        "self.running = []",
        "super()._preempt_request(request)",
        "self._ledger.dispatch(step, scheduled, now_ns)",
        "names.append(text.partition(': '))",
        "time.monotonic_ns()",
        "from vllm.v1.request import Request",
    ],
)
def test_the_scan_lets_listed_own_and_pythons_names_pass(line: str) -> None:
    """The scan complains about nothing else."""
    source = f"import time\n{line}"
    assert unlisted_names(source, OWN_NAMES, listed_names()) == set()


def test_what_is_set_outside_init_does_not_count_as_ours() -> None:
    """Assigning to an attribute of vLLM's in a method does not hide it from the scan."""
    source = "class A:\n def __init__(self): self.a = 1\n def f(self): self.running = []"
    assert own_names([source]) == {"A", "__init__", "a", "f"}


@pytest.mark.parametrize("path", ENGINE_FILES, ids=lambda path: path.name)
def test_every_wrapped_method_is_a_seam(path: Path) -> None:
    """What is wrapped has a row of its own: its parameters are checked before."""
    rows = {seam.name for seam in SEAMS} | {
        f"{seam.module.rpartition('.')[2]}.{seam.name}" for seam in SEAMS
    }
    assert set(wrap_calls(path.read_text())) <= rows


def test_the_scan_of_wrapped_methods_sees_some() -> None:
    """The test above has something to look at."""
    found = [call for path in ENGINE_FILES for call in wrap_calls(path.read_text())]
    assert "EngineCoreProc._process_engine_step" in found


# --- collisions ---------------------------------------------------------------------------------


def test_our_schedulers_override_nothing_by_accident() -> None:
    """What our classes define and vLLM's have too is overridden on purpose, hence listed."""
    vllms = set(dir(async_scheduler_module.AsyncScheduler))
    for module in (scheduler_module, async_scheduler_module):
        vllms |= _attributes_set_on_self(module_tree(module))
    tree = ast.parse(inspect.getsource(inspect.getmodule(PacedScheduler)))
    ours = own_names([ast.unparse(tree)]) & (
        _attributes_set_in_init(tree) | set(vars(PacedScheduler)) | set(vars(PacedAsyncScheduler))
    )
    overridden = {name for name in ours & vllms if not name.startswith("__")}
    assert overridden <= listed_names()
    assert "schedule" in overridden


def _attributes_set_on_self(tree: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def _attributes_set_in_init(tree: ast.AST) -> set[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        name
        for function in functions
        if function.name == "__init__"
        for name in _attributes_set_on_self(function)
    }


# --- no copied bodies ---------------------------------------------------------------------------

LINES = 6


def test_no_upstream_body_is_copied() -> None:
    """Six significant lines in a row of ours never stand in vLLM's scheduler or engine."""
    theirs = {
        window: path
        for folder in ("v1/core", "v1/engine")
        for path in (Path(vllm.__file__).parent / folder).rglob("*.py")
        for window in windows(path.read_text())
    }
    ours = {window: path for path in PACKAGE.rglob("*.py") for window in windows(path.read_text())}
    assert len(theirs) > 1000
    assert [(ours[window].name, theirs[window].name) for window in ours.keys() & theirs] == []


def test_a_copied_body_would_be_found() -> None:
    """Indentation, comments and blank lines do not hide a copy."""
    source = inspect.getsource(import_module("vllm.v1.core.sched.scheduler"))
    body = inspect.getsource(scheduler_module.Scheduler.finish_requests)
    copy = "\n    # ours now\n\n".join(f"  {line}" for line in body.splitlines())
    assert set(windows(copy)) & set(windows(source))


def windows(source: str) -> Iterator[tuple[str, ...]]:
    """Yield every run of significant lines; imports, comments and brackets alone are none."""
    lines = [line.strip() for line in source.splitlines()]
    significant = [
        line
        for line in lines
        if any(map(str.isalnum, line)) and not line.startswith(("#", "import ", "from "))
    ]
    for start in range(len(significant) - LINES + 1):
        yield tuple(significant[start : start + LINES])
