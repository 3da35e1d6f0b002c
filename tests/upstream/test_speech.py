"""Routes for speech name the user in a form field, as JSON text."""

from io import BytesIO
from typing import Any

import pytest
from fastapi import UploadFile
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from vllm_pacer.engine.identity import check_user, user_of
from vllm_pacer.quota import ANONYMOUS_USER

by_request = pytest.mark.parametrize("request_cls", [TranscriptionRequest, TranslationRequest])


def params_of(request_cls: Any, **form: str) -> Any:
    """Return the sampling parameters that a form becomes."""
    request = request_cls.model_validate({"file": UploadFile(BytesIO(b"")), **form})
    return request.to_sampling_params(10, {})


@by_request
def test_a_form_names_its_user(request_cls: Any) -> None:
    """`vllm_xargs` in a form arrives where the scheduler looks for the user."""
    params = params_of(request_cls, vllm_xargs='{"output_rate_user": "alice"}')
    check_user(params)
    assert user_of(params) == "alice"


@by_request
def test_a_form_without_a_user_has_no_name(request_cls: Any) -> None:
    """Without the field the request is everybody else's."""
    assert user_of(params_of(request_cls)) == ANONYMOUS_USER


@by_request
def test_a_bad_name_in_a_form_is_refused(request_cls: Any) -> None:
    """A name that cannot name a user is an error that says which field."""
    with pytest.raises(ValueError, match=r"vllm_xargs\.output_rate_user"):
        check_user(params_of(request_cls, vllm_xargs='{"output_rate_user": ""}'))
