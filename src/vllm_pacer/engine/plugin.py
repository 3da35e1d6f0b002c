"""The entry point vLLM calls in each of its processes."""


def register() -> None:
    """Add the flags to vLLM's argument parser; nothing else happens until one of them is given."""
    from vllm_pacer.engine.flags import install_flags

    install_flags()
