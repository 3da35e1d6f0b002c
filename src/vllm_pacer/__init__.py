"""vllm-pacer: cap each user's generation speed inside vLLM's scheduler.

Importing the package has no effect on vLLM. The limits are switched on by flags of `vllm serve`,
or offline by `llm_kwargs`.
"""

from collections.abc import Mapping
from typing import Any

from vllm_pacer.clock import FakeClock
from vllm_pacer.config import ConfigError, PacerConfig
from vllm_pacer.limiter import OutputRateLimiter
from vllm_pacer.quota import Quota

__all__ = ["ConfigError", "FakeClock", "OutputRateLimiter", "PacerConfig", "Quota", "llm_kwargs"]
__version__ = "0.1.0"


def llm_kwargs(
    default: float | None,
    users: Mapping[str, float | None] | None = None,
    burst: float = 0.1,
    weights: Mapping[str, float] | None = None,
    fairness: bool = True,
) -> dict[str, Any]:
    """Return what to pass to `vllm.LLM` so that it limits its users, and let vLLM accept it.

    vLLM's engine arguments are prepared for it in this process; call it in the process that builds
    the `LLM`.

    >>> LLM("model", **llm_kwargs(default=100, users={"user-a": 20}))  # doctest: +SKIP

    Args:
        default: Tokens per second of every user that is not named; `None` for no limit.
        users: Tokens per second by user; `None` for no limit.
        burst: Seconds' worth of tokens that a user may be ahead of its rate.
        weights: Users' weights when they share the engine; 1 if not named.
        fairness: Whether users share the engine, or come in vLLM's own order.

    Raises:
        ConfigError: A value cannot be used.
        SeamError: The installed vLLM is not supported.
    """
    from vllm_pacer.config import make_config
    from vllm_pacer.engine.factory import PacedSchedulerFactory
    from vllm_pacer.engine.seams import check_seams, vllm_imports

    settings = {
        "default": default,
        "users": {} if users is None else users,
        "burst": burst,
        "weights": {} if weights is None else weights,
        "fairness": fairness,
    }
    pacing = make_config(settings, "llm_kwargs")
    check_seams()
    with vllm_imports():
        from vllm_pacer.engine.flags import install_engine_config
    install_engine_config()
    return {"scheduler_cls": PacedSchedulerFactory(pacing)}
