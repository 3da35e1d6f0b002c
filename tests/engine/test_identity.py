"""Whose request it is, on the routes that a text model does not have."""

import json
from io import BytesIO
from typing import Any

import pytest
from fastapi import UploadFile
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from vllm_pacer.engine.identity import user_of


@pytest.mark.parametrize("route", [TranscriptionRequest, TranslationRequest])
def test_audio_form_names_its_user(route: Any) -> None:
    """The field `vllm_xargs` of an audio form, JSON in a text, reaches the sampling parameters."""
    form = {
        "file": UploadFile(BytesIO()),
        "model": "m",
        "vllm_xargs": json.dumps({"output_rate_user": "user-a"}),
    }
    assert user_of(route.model_validate(form).to_sampling_params(8)) == "user-a"
