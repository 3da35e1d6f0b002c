"""What clients see: what is refused, and vLLM's own limit of its queue."""

import asyncio
import json
from http import HTTPStatus
from typing import Any

import pytest
from served.client import Answer, Client, cancelled
from served.server import Server

TOO_MANY = 130
QUEUE_LIMIT = 100

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
}


def _body(route: str, user: object, **more: object) -> dict[str, Any]:
    return {"model": "m", **ROUTES[route], "vllm_xargs": {"output_rate_user": user}, **more}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "user",
    [7, 0.5, "", "x" * 257, ["one-stream"], "one\nstream", "\ud800"],
    ids=["int", "float", "empty", "long", "list", "line break", "surrogate"],
)
def test_bad_user_is_refused(roomy: Server, route: str, user: object) -> None:
    """A user's name that is none gives HTTP 400 naming the field, and costs nothing."""
    start = roomy.record.position()
    status, body = roomy.post(route, _body(route, user))
    assert status == 400, body
    assert "output_rate_user" in body
    assert not roomy.record.since(start).user_of


def test_seeded_requests_over_quota_are_answered(roomy: Server) -> None:
    """A seed does not break a prefill that has to wait for quota."""

    async def run() -> list[Answer]:
        async with Client(roomy.url) as client:
            calls = (
                client.complete("four-streams", "Hi", 3, seed=number, temperature=1)
                for number in range(8)
            )
            return await asyncio.gather(*calls)

    answers = asyncio.run(run())
    assert [answer.status for answer in answers] == [200] * 8
    assert all(answer.finish_reason for answer in answers)


def test_longest_user_is_accepted(roomy: Server) -> None:
    """256 characters are allowed."""
    route = "/v1/completions"
    assert roomy.post(route, _body(route, "x" * 256, max_tokens=1))[0] == 200


@pytest.mark.parametrize(
    ("route", "stream"),
    [
        ("/v1/completions", False),
        ("/v1/chat/completions", False),
        ("/v1/chat/completions", True),
    ],
)
def test_beam_search_is_refused(roomy: Server, route: str, stream: bool) -> None:
    """Beam search gives HTTP 400 that says what to leave out, and the server goes on."""
    beam = _body(route, "free", use_beam_search=True, n=2, stream=stream)
    status, body = roomy.post(route, beam)
    assert "use_beam_search" in body
    assert status == 400, body
    status, body = roomy.post(route, _body(route, "free"))
    assert status == 200, body
    assert json.loads(body)["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("user", ["limited", "free"])
def test_queue_limit_is_vllm_s_own(roomy: Server, user: str) -> None:
    """Of 130 requests at once, 30 get vLLM's 503: as many paused as without a limit."""
    start = roomy.record.position()
    refused = asyncio.run(_flood(roomy, user, start))
    assert len(roomy.record.settled_since(start).user_of) == QUEUE_LIMIT
    assert refused == TOO_MANY - QUEUE_LIMIT


async def _flood(server: Server, user: str, start: int) -> int:
    """Send everything, hang up once each request is accepted or refused; return how many were."""
    async with Client(server.url) as client:
        answers = [Answer(user) for _ in range(TOO_MANY)]
        tasks = [
            asyncio.create_task(client.complete(user, "Hi", 2000, ignore_eos=True, answer=answer))
            for answer in answers
        ]
        refused = accepted = 0
        while refused + accepted < TOO_MANY:
            await asyncio.wait(tasks, timeout=0.1, return_when="FIRST_EXCEPTION")
            refused = sum(answer.status == HTTPStatus.SERVICE_UNAVAILABLE for answer in answers)
            accepted = len(server.record.since(start).user_of)
        await cancelled(tasks)
    return refused
