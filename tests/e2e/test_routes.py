"""Every route of vLLM's server that generates: how a request names its user there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served.record import Excerpt, Record
from served.server import MODEL_ARGS, PLUGIN, Server, environment, tail

FIELD = "output_rate_user"
ANONYMOUS = "__anonymous__"
MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT = {"messages": MESSAGES, "max_tokens": 2}
PROMPT = {"prompt": "Hi", "max_tokens": 2}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", PROMPT),
    "two prompts": ("/v1/completions", {**PROMPT, "prompt": ["Hi", "Ho"]}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat batch": ("/v1/chat/completions/batch", {**CHAT, "messages": [MESSAGES, MESSAGES]}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", CHAT),
    "completion invocation": ("/invocations", PROMPT),
    "chat invocation": ("/invocations", CHAT),
    "tokens": ("/inference/v1/generate", {"token_ids": [5, 6, 7]}),
}
REQUESTS = {"two prompts": 2, "chat batch": 2}
"""How many requests the engine gets of one body, if not one."""

STREAMS = {"completions", "two prompts", "chat", "responses", "messages", "tokens"}
WAYS = [(name, False) for name in BODIES] + [(name, True) for name in BODIES if name in STREAMS]

DECISIONS: dict[str, dict[str, Any]] = {
    "/v1/systemone": {"state": "Hi", "questions": {"q": {"type": "boolean"}}},
    "/v1/decisions": {
        "model": "m",
        "input": "Hi",
        "questions": [{"type": "predicate", "instructions": "Is it a greeting?"}],
    },
}
"""The second is there from vLLM 0.33 on."""

SCORING = {"query": "Hi", "items": ["a", "b", "c"], "label_token_ids": [10, 11]}

NOTHING_TO_SAY = {
    "/detokenize",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/ping",
    "/scale_elastic_ep",
    "/tokenize",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
}
"""What can be posted and generates nothing."""


def _asked(
    server: Server, name: str, xargs: dict[str, Any] | None, **more: object
) -> tuple[int, str, Excerpt]:
    """Post a body with these `vllm_xargs`, where the route has them."""
    route, body = BODIES[name]
    body = {"model": "m", **body, **more}
    if name == "tokens":
        body["sampling_params"] = {"max_tokens": 2, "extra_args": xargs}
    elif xargs is not None:
        body["vllm_xargs"] = xargs
    start = server.record.position()
    status, text = server.post(route, body)
    return status, text, server.record.settled_since(start)


@pytest.mark.parametrize(("name", "stream"), WAYS)
def test_route_passes_the_user_on(small: Server, name: str, stream: bool) -> None:
    """The engine charges the user that the request names."""
    status, text, excerpt = _asked(small, name, {FIELD: "c"}, stream=stream)
    assert status == 200, text
    assert list(excerpt.user_of.values()) == ["c"] * REQUESTS.get(name, 1)
    assert excerpt.charged_by_user["c"] >= 2


@pytest.mark.parametrize(("name", "stream"), WAYS)
def test_request_without_a_user_is_anonymous(small: Server, name: str, stream: bool) -> None:
    """Who names no user is `__anonymous__`; a route's own fields for a user play no part."""
    own = {"metadata": {"user_id": "c"}} if name == "messages" else {"user": "c"}
    status, text, excerpt = _asked(small, name, None, stream=stream, **own)
    assert status == 200, text
    assert list(excerpt.user_of.values()) == [ANONYMOUS] * REQUESTS.get(name, 1)


# Of an error in these streams vLLM tells less: `/v1/responses` breaks off.
@pytest.mark.parametrize(
    ("name", "stream"),
    [way for way in WAYS if way not in [("responses", True), ("messages", True)]],
)
def test_bad_user_is_refused(small: Server, name: str, stream: bool) -> None:
    """A bad name gives an error that names the field: HTTP 400, or what a stream ends with."""
    status, text, excerpt = _asked(small, name, {FIELD: 7}, stream=stream)
    assert stream or status == 400, text
    assert f"vllm_xargs.{FIELD} must be a string" in text
    assert not excerpt.user_of


def test_xargs_beside_sampling_params_are_ignored(small: Server) -> None:
    """`/inference/v1/generate` takes the user from `sampling_params` alone."""
    _, text, excerpt = _asked(small, "tokens", None, vllm_xargs={FIELD: "c"})
    assert list(excerpt.user_of.values()) == [ANONYMOUS], text


def test_scoring_cannot_name_a_user(small: Server) -> None:
    """`/generative_scoring` passes nothing on: each item is a token of `__anonymous__`."""
    start = small.record.position()
    body = {"model": "m", **SCORING, "vllm_xargs": {FIELD: "c"}, "user": "c"}
    status, text = small.post("/generative_scoring", body)
    assert status == 200, text
    excerpt = small.record.settled_since(start)
    assert list(excerpt.user_of.values()) == [ANONYMOUS] * len(SCORING["items"])
    assert excerpt.charged_by_user == {ANONYMOUS: len(SCORING["items"])}


@pytest.mark.parametrize("route", DECISIONS)
def test_decisions_need_another_model(small: Server, route: str) -> None:
    """Routes for decisions answer that this model makes none, and ask nothing of the engine."""
    start = small.record.position()
    status, text = small.post(route, DECISIONS[route])
    assert status == (501 if route in _posted(small) else 404), text
    assert not small.record.since(start).user_of


def test_no_other_route_generates(small: Server) -> None:
    """What can be posted to this server is tested here or generates nothing."""
    named = {route for route, _ in BODIES.values()}
    unnamed = {"/generative_scoring", *DECISIONS}
    posted = _posted(small) - NOTHING_TO_SAY
    assert named <= posted
    assert posted <= named | unnamed


def _posted(server: Server) -> set[str]:
    paths = json.loads(server.get("/openapi.json"))["paths"]
    return {path for path, methods in paths.items() if "post" in methods}


def test_batch_file_names_a_user_per_line(vllm_version: str, tmp_path: Path) -> None:
    """`vllm run-batch` takes the user from each line, and refuses a bad one alone."""
    lines = {"named": {FIELD: "c"}, "bad": {FIELD: 7}, "nobody": None}
    requests = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", **CHAT, "vllm_xargs": xargs},
        }
        for name, xargs in lines.items()
    ]
    source, target, record, log = (tmp_path / name for name in ("in", "out", "record", "log"))
    source.write_text("\n".join(map(json.dumps, requests)))
    with log.open("wb") as output:
        finished = subprocess.run(
            [
                *(sys.executable, str(PLUGIN / "vllm_cli.py"), "run-batch", *MODEL_ARGS),
                *("-i", str(source), "-o", str(target)),
                *("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"),
                *("--default-user-output-tokens-per-second", "50"),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(vllm_version, "sync", record),
            timeout=240,
        )
    assert finished.returncode == 0, tail(log)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    statuses = {each["custom_id"]: each["response"]["status_code"] for each in answers}
    assert statuses == {"named": 200, "bad": 400, "nobody": 200}
    assert sorted(Record(record).since().user_of.values()) == [ANONYMOUS, "c"]
