"""A client that notes when each token arrives."""

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Prompt = str | list[int]


@dataclass
class Answer:
    """What came back of one streamed request.

    Attributes:
        user: Who asked.
        request_id: vLLM's name for the request.
        sent_ns: The instant at which the request was sent.
        status: The HTTP status, or the one that an error in the stream names.
        arrivals_ns: The instant of each token's arrival, in order.
        token_ids: The tokens.
        text: The text.
        finish_reason: The model's reason; `None` if it was cut short here.
        completion_tokens: What vLLM bills; `None` if it was cut short here.
        body: The text of an error.

    """

    user: str
    request_id: str = ""
    sent_ns: int = 0
    status: int = 0
    arrivals_ns: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None
    body: str = ""


class Client:
    """Streams completions from one server. Use it as an asynchronous context."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(
            # What is kept open the server may close, perhaps while we use it.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def complete(
        self,
        user: str,
        prompt: Prompt,
        max_tokens: int,
        *,
        stop_after: int | None = None,
        answer: Answer | None = None,
        **parameters: Any,
    ) -> Answer:
        """Stream one completion; hang up after `stop_after` tokens, or when cancelled.

        Pass `answer` to have what arrived so far while the call still runs.
        """
        answer = answer or Answer(user)
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "vllm_xargs": {"output_rate_user": user},
            **parameters,
        }
        answer.sent_ns = time.monotonic_ns()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            answer.status = response.status
            if response.status != 200:
                answer.body = await response.text()
                return answer
            async for line in response.content:
                now_ns = time.monotonic_ns()
                if line.startswith(b"data: {"):
                    _note(answer, json.loads(line[6:]), now_ns)
                    if stop_after is not None and len(answer.token_ids) >= stop_after:
                        response.close()
                        break
        return answer


def _note(answer: Answer, chunk: dict[str, Any], now_ns: int) -> None:
    if error := chunk.get("error"):
        # vLLM has sent the headers by then.
        answer.status, answer.body = error["code"], error["message"]
        return
    answer.request_id = chunk["id"]
    if usage := chunk.get("usage"):
        answer.completion_tokens = usage["completion_tokens"]
    for choice in chunk["choices"]:
        tokens = choice.get("token_ids") or []
        answer.token_ids += tokens
        answer.arrivals_ns += [now_ns] * len(tokens)
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason


def ask(url: str, user: str, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Ask for a completion of each prompt, all at once, that ends with its last token."""

    async def ask_all() -> list[Answer]:
        async with Client(url) as client:
            return await asyncio.gather(
                *(client.complete(user, prompt, tokens, ignore_eos=True) for prompt in prompts)
            )

    return asyncio.run(ask_all())


def arrivals_of(answers: Iterable[Answer]) -> list[int]:
    """Return the arrival of every token of these answers, in order."""
    return sorted(instant for answer in answers for instant in answer.arrivals_ns)


async def cancelled(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks, which makes their clients hang up, and wait until they are gone."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
