"""Wrapping vLLM's methods: once each, undone in tests, and recognisable."""

from collections.abc import Callable
from functools import wraps
from typing import Any

_WRAPPED_BY = "_vllm_pacer_wraps"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of `around(original, *args, **kwargs)`.

    A second call for the same name has no effect. Static and class methods stay what they are.
    """
    raw = vars(owner)[name]
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    function = raw.__func__ if kind else raw
    if hasattr(function, _WRAPPED_BY):
        return

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(wrapper, _WRAPPED_BY, function)
    setattr(owner, name, kind(wrapper) if kind else wrapper)


def unwrap(owner: Any, name: str) -> None:
    """Put the original back; no effect if it is not wrapped."""
    raw = vars(owner)[name]
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    original = getattr(raw.__func__ if kind else raw, _WRAPPED_BY, None)
    if original is not None:
        setattr(owner, name, kind(original) if kind else original)
