"""The entry point vLLM calls in each of its processes."""

import logging


def register() -> None:
    """Add the flags to vLLM's argument parser; nothing else happens until one of them is given.

    A vLLM that cannot have them is left as it is, since nobody may want limits of it. Its parser
    refuses the flags; the log says why.
    """
    from vllm_pacer.engine.seams import SeamError, vllm_imports

    try:
        with vllm_imports():
            from vllm_pacer.engine.flags import install_flags
        install_flags()
    except SeamError as error:
        # vLLM configures the loggers below its own name.
        logging.getLogger(f"vllm.{__name__}").error("%s", error)
