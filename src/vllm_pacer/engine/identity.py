"""Whose request it is: `vllm_xargs.output_rate_user`, which vLLM carries in `extra_args`."""

from vllm.sampling_params import SamplingParams

from vllm_pacer.config import check_user_name
from vllm_pacer.quota import ANONYMOUS_USER

FIELD = "output_rate_user"


def check_user(params: SamplingParams) -> None:
    """Check the user's name in a new request.

    Raises:
        ValueError: The name cannot name a user; the message names the field.
    """
    extra_args = params.extra_args or {}
    if FIELD in extra_args:
        try:
            check_user_name(extra_args[FIELD])
        except ValueError as error:
            raise ValueError(f"vllm_xargs.{FIELD} {error}") from None


def user_of(params: SamplingParams) -> str:
    """Return the user of an accepted request; requests that name none share one user."""
    user = (params.extra_args or {}).get(FIELD)
    return user if isinstance(user, str) and user else ANONYMOUS_USER
