"""Which names this package uses of vLLM's, read from its source."""

import ast
import builtins
import inspect
import io
import logging
import queue
import struct
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from packaging.version import Version

import vllm_pacer
from vllm_pacer.engine import seams

PACKAGE = Path(vllm_pacer.__file__).parent
ENGINE = PACKAGE / "engine"
ENGINE_FILES = sorted(ENGINE.glob("*.py"))

# Their methods are called in engine/, on objects that are not vLLM's.
_FOREIGN_TYPES = (
    ArgumentParser,
    Path,
    Version,
    classmethod,
    deque,
    io.BufferedRandom,
    logging.Logger,
    queue.Queue,
    struct.Struct,
)


def listed_names() -> set[str]:
    """Return every name that the tables in `seams` list."""
    names = {part for seam in seams.SEAMS for part in seam.name.split(".")}
    for table, value in vars(seams).items():
        if table.endswith("_ATTRIBUTES"):
            names |= set(value)
    return names


def unlisted_names(source: str, own: set[str], listed: set[str]) -> set[str]:
    """Return the names in a module that are neither ours, nor Python's, nor listed.

    Looked at are attributes, constant names given to `getattr`, `hasattr` and `wrap`, and private
    names imported from vLLM. A public import needs no row: without it the module does not load.
    """
    tree = ast.parse(source)
    modules = _imported_modules(tree)
    used = set(_private_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in modules):
                used.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "wrap",
        ):
            used |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
    return {name for name in used if not _is_dunder(name)} - own - listed - _pythons_names()


def own_names(sources: Iterable[str]) -> set[str]:
    """Return what these modules define: functions, classes, their fields and instance attributes.

    Of instance attributes only those count that a class sets in its own `__init__`; assigning to
    `self.running` elsewhere does not make vLLM's attribute ours.
    """
    names: set[str] = set()
    for source in sources:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names |= {node.name} | set(_class_attributes(node))
        for node in tree.body:
            names |= set(_defined(node))
    return names


def wrapped_methods() -> list[tuple[Any, str]]:
    """Return owner and name of everything in `seams` that lives in a class or module."""
    methods = []
    for seam in seams.SEAMS:
        owner: Any = import_module(seam.module)
        *path, name = seam.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        methods.append((owner, name))
    return methods


def wrap_calls(source: str) -> list[str]:
    """Return `Owner.name` of each call of `wrap` in a module."""
    return [
        f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "wrap"
    ]


def _class_attributes(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        yield from _defined(node)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                    yield each.attr


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _imported_modules(tree: ast.Module) -> set[str]:
    """Return the names of modules; what is taken from a module of Python's is not vLLM's."""
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith("vllm.")
    }


def _private_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            yield from (part for part in parts if part.startswith("_"))


def _pythons_names() -> set[str]:
    types = [*_FOREIGN_TYPES, *(t for t in vars(builtins).values() if inspect.isclass(t))]
    return {name for each in types for name in dir(each)}


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
