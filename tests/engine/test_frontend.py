"""A user's name is checked where vLLM's front end validates a request's parameters."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_pacer.engine.frontend import install_frontend

STOCK_ANSWER = "what vLLM answers"


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function that validates a request of a user as vLLM does, with limits installed."""
    for mixin in (BeamSearchOnlineMixin, BeamSearchOfflineMixin):
        monkeypatch.setattr(mixin, "beam_search", mixin.beam_search)  # put back at the end
    monkeypatch.setattr(InputProcessor, "_validate_params", lambda *_: STOCK_ANSWER)
    install_frontend(None)
    processor = object.__new__(InputProcessor)
    return lambda user: processor._validate_params(
        SamplingParams(extra_args={"output_rate_user": user}), ("generate",)
    )


@pytest.mark.parametrize(
    "user", ["", "x" * 257, "a\nb", "a\x1b[2J", "a\u2028b", "\ud800", "a\udc80"]
)
def test_a_bad_name_is_refused_with_its_field(validate: Callable[[str], Any], user: str) -> None:
    """The error is the one that vLLM answers with HTTP 400, and fits into a line of the log."""
    with pytest.raises(VLLMValidationError, match=r"^vllm_xargs\.output_rate_user must ") as caught:
        validate(user)
    assert caught.value.parameter == "vllm_xargs.output_rate_user"
    assert str(caught.value).isprintable()
    str(caught.value).encode()


@pytest.mark.parametrize("user", ["user-a", "Zoë 🚀", "x" * 256])
def test_a_good_name_leaves_the_answer_to_vllm(validate: Callable[[str], Any], user: str) -> None:
    """A request whose user can be named is validated by vLLM as any other."""
    assert validate(user) is STOCK_ANSWER
