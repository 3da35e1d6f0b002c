"""The entry point vLLM calls in each of its processes."""


def register() -> None:
    """Add the flags."""
