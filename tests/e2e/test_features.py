"""What a request asks of its output it gets under a limit too, unchanged."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from served.server import Server

Body = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
LIMITED = "one-stream"
CROWDED = "texts"
EOS = "2"
MIN_TOKENS = 12

PROMPT: Body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
TALK: Body = {
    "messages": [{"role": "user", "content": "Describe a car"}],
    "max_tokens": 60,
    "temperature": 0,
}
SCHEMA: Body = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "doors": {"enum": [2, 3, 5]},
        "electric": {"type": "boolean"},
    },
    "required": ["colour", "doors", "electric"],
    "additionalProperties": False,
}
JSON_SCHEMA: Body = {"type": "json_schema", "json_schema": {"name": "car", "schema": SCHEMA}}

FEATURES: dict[str, tuple[str, Body]] = {
    "plain": (COMPLETIONS, PROMPT),
    "json schema, chat": (CHAT, {**TALK, "response_format": JSON_SCHEMA}),
    "json schema, structured_outputs": (
        COMPLETIONS,
        {**PROMPT, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
    ),
    "json schema, responses": (
        RESPONSES,
        {
            "input": "Describe a car",
            "max_output_tokens": 60,
            "temperature": 0,
            "text": {"format": {"type": "json_schema", "name": "car", "schema": SCHEMA}},
        },
    ),
    "regex": (COMPLETIONS, {**PROMPT, "structured_outputs": {"regex": "[a-f]{12}[0-9]{12}"}}),
    "logprobs": (COMPLETIONS, {**PROMPT, "logprobs": 3}),
    "logprobs, chat": (CHAT, {**TALK, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}),
    "prompt_logprobs": (COMPLETIONS, {**PROMPT, "prompt_logprobs": 2}),
    # vLLM allows one choice at temperature 0.
    "n": (COMPLETIONS, {**PROMPT, "n": 2, "temperature": 1, "seed": 7}),
    "min_tokens": (
        COMPLETIONS,
        {**PROMPT, "min_tokens": MIN_TOKENS, "logit_bias": {EOS: 100}},
    ),
    "echo": (COMPLETIONS, {**PROMPT, "echo": True}),
    "echo with logprobs": (COMPLETIONS, {**PROMPT, "echo": True, "logprobs": 1}),
    "penalties": (
        COMPLETIONS,
        {**PROMPT, "presence_penalty": 1, "frequency_penalty": 1, "repetition_penalty": 1.5},
    ),
    "seed": (COMPLETIONS, {**PROMPT, "temperature": 1, "seed": 3}),
}

NEW_EACH_TIME = {"id", "created", "created_at", "completed_at", "metrics"}


def _answer(server: Server, user: str, route: str, body: Body) -> Any:
    """Return what is answered, without what differs from one request to the next."""
    named = {"model": "m", **body, "vllm_xargs": {"output_rate_user": user}}
    status, text = server.post(route, named)
    assert status == 200, text
    return _lasting(json.loads(text))


def _lasting(part: Any) -> Any:
    if isinstance(part, dict):
        return {key: _lasting(each) for key, each in part.items() if key not in NEW_EACH_TIME}
    return [_lasting(each) for each in part] if isinstance(part, list) else part


@dataclass(frozen=True)
class Answers:
    """What is answered without a limit and with one, and whether the limit paused the request."""

    free: Any
    limited: Any
    was_paused: bool


def _both(server: Server, route: str, body: Body) -> Answers:
    free = _answer(server, "free", route, body)
    start = server.record.position()
    limited = _answer(server, LIMITED, route, body)
    excerpt = server.record.settled_since(start)
    return Answers(free, limited, any(step["paused"] for step in excerpt.steps))


@pytest.fixture(scope="module")
def answers(servers: dict[str, Server]) -> dict[str, Answers]:
    """The answers to every request of this module, one at a time."""
    return {name: _both(servers["roomy"], *each) for name, each in FEATURES.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_answer_is_the_same(answers: dict[str, Answers], feature: str) -> None:
    """A paused request gives the whole answer of an unlimited one, to the last digit."""
    assert answers[feature].was_paused
    assert answers[feature].limited == answers[feature].free


@pytest.mark.parametrize("feature", [name for name in FEATURES if name.startswith("json")])
def test_paused_json_follows_its_schema(answers: dict[str, Answers], feature: str) -> None:
    """What a paused request writes is an object with the three properties and values allowed."""
    car = json.loads(_text(answers[feature].limited))
    assert car.keys() == SCHEMA["properties"].keys()
    assert car["colour"] in ("red", "green", "blue")
    assert car["doors"] in (2, 3, 5)
    assert isinstance(car["electric"], bool)


def test_logprobs_come(answers: dict[str, Answers]) -> None:
    """A paused request has the log probabilities of each of its tokens, or of its prompt's."""
    (choice,) = answers["logprobs"].limited["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == PROMPT["max_tokens"]
    (choice,) = answers["logprobs, chat"].limited["choices"]
    assert len(choice["logprobs"]["content"]) == PROMPT["max_tokens"]
    limited = answers["prompt_logprobs"].limited
    (choice,) = limited["choices"]
    assert len(choice["prompt_logprobs"]) == limited["usage"]["prompt_tokens"]


def test_echo_comes_first(answers: dict[str, Answers]) -> None:
    """With `echo` the text is the prompt and what follows it without."""
    plain, echo = (answers[name].limited["choices"][0]["text"] for name in ("plain", "echo"))
    assert echo == PROMPT["prompt"] + plain


def test_both_choices_come(answers: dict[str, Answers]) -> None:
    """With n=2 the limit is shared by two choices that differ, and both are whole."""
    answer = answers["n"].limited
    first, second = (choice["text"] for choice in answer["choices"])
    assert first != second
    assert answer["usage"]["completion_tokens"] == 2 * PROMPT["max_tokens"]


def test_min_tokens_are_kept(answers: dict[str, Answers]) -> None:
    """A model that would end at once ends right after `min_tokens`, pauses or not."""
    answer = answers["min_tokens"].limited
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == MIN_TOKENS + 1


def test_stop_string_ends_a_paused_request(roomy: Server, answers: dict[str, Answers]) -> None:
    """A stop string in the middle ends a paused request where it ends an unlimited one."""
    whole = answers["plain"].free["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:4]
    both = _both(roomy, COMPLETIONS, {**PROMPT, "stop": [stop]})
    assert both.was_paused
    assert both.limited == both.free
    (choice,) = both.limited["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == whole[: whole.index(stop)]


def test_all_at_once_are_the_same(roomy: Server, answers: dict[str, Answers]) -> None:
    """The features beside each other in one crowded batch, most of them paused, change no text."""
    start = roomy.record.position()
    together = asyncio.run(_together(roomy.url))
    excerpt = roomy.record.settled_since(start)
    assert max(step["paused"] for step in excerpt.steps) >= len(FEATURES) - 1
    assert [_text(each) for each in together] == [_text(each.free) for each in answers.values()]


async def _together(url: str) -> list[Any]:
    async with aiohttp.ClientSession() as session:

        async def ask(route: str, body: Body) -> Any:
            named = {"model": "m", **body, "vllm_xargs": {"output_rate_user": CROWDED}}
            async with session.post(url + route, json=named) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        return await asyncio.gather(*(ask(*each) for each in FEATURES.values()))


def _text(answer: Body) -> str:
    """Return the text of an answer of any of the routes, of all its choices."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    return "".join(
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    )
