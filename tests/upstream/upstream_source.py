"""Reads the installed vLLM's source; what a guard says about behaviour, it says from there."""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def module_tree(module: ModuleType) -> ast.Module:
    """Return a module's syntax tree; every node knows its `parent`."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


def method(module_name: str, cls: str, name: str) -> ast.FunctionDef:
    """Return the definition of a method."""
    tree = module_tree(import_module(module_name))
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls)
    (found,) = (
        node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return found


def calls(tree: ast.AST, function: str) -> list[ast.Call]:
    """Return the calls of a function, written as in the source, in the order of the source."""
    return sorted(
        (
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == function
        ),
        key=lambda call: call.lineno,
    )


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes around a node, the innermost first."""
    while (node := getattr(node, "parent", None)) is not None:  # type: ignore[assignment]
        yield node


def enclosing(node: ast.AST, kind: type[ast.AST]) -> ast.AST:
    """Return the innermost node of a kind around a node."""
    return next(each for each in parents(node) if isinstance(each, kind))


def outermost_loop(node: ast.AST) -> ast.While:
    """Return the outermost `while` around a node."""
    return [each for each in parents(node) if isinstance(each, ast.While)][-1]


def statements_before(node: ast.AST) -> list[ast.stmt]:
    """Return the statements of the innermost block around a node that come before it."""
    statement = node if isinstance(node, ast.stmt) else enclosing(node, ast.stmt)
    parent = statement.parent  # type: ignore[attr-defined]
    for block in ("body", "orelse", "finalbody"):
        if statement in getattr(parent, block, ()):
            statements = getattr(parent, block)
            return statements[: statements.index(statement)]
    raise AssertionError(f"{ast.unparse(statement)} stands in no block")


def always_runs(statement: ast.stmt, *fragments: str) -> bool:
    """Whether a statement contains one of the fragments, in both branches if it is an `if`."""
    if isinstance(statement, ast.If):
        return all(
            any(always_runs(each, *fragments) for each in branch)
            for branch in (statement.body, statement.orelse)
        )
    return any(fragment in ast.unparse(statement) for fragment in fragments)
