"""The users of the demo: each keeps its streams busy with one question after another."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

BURST_SECONDS = 0.1
QUESTIONS = (
    "Explain how a traffic light works.",
    "Write a short story about a lighthouse keeper.",
    "How do bees make honey?",
    "Describe a walk through a forest in autumn.",
    "Why is the sky blue?",
    "Tell me about the history of bread.",
)


@dataclass
class User:
    """What a user may do, and what it got."""

    name: str
    tokens_per_second: int | None
    streams: int
    stamps: list[float] = field(default_factory=list)
    """The moment of every token that arrived, on the clock of `time.monotonic`."""
    first_token_seconds: list[float] = field(default_factory=list)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [""] * self.streams

    def __str__(self) -> str:
        return f"{self.name}: {self.streams} stream{'s' * (self.streams > 1)}"

    def tokens_since(self, moment: float) -> int:
        """Return the number of tokens that arrived after a moment."""
        return sum(stamp > moment for stamp in self.stamps)

    def settled_rate(self) -> float:
        """Return tokens per second from the first token on that the burst does not speed up."""
        burst_tokens = int(BURST_SECONDS * self.tokens_per_second) if self.tokens_per_second else 0
        stamps = self.stamps[burst_tokens + 1 :]
        if len(stamps) < 2:
            return 0.0
        return (len(stamps) - 1) / (stamps[-1] - stamps[0])


async def run_user(client: httpx.AsyncClient, user: User, seconds: float) -> None:
    """Keep all streams of a user busy for about so long; every answer ends on its own."""
    await asyncio.gather(
        *(_run_stream(client, user, number, seconds) for number in range(user.streams))
    )


async def _run_stream(client: httpx.AsyncClient, user: User, number: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    question = number
    while (remaining_seconds := deadline - time.monotonic()) > 1:
        # A limited user asks for what its quota allows, so that nothing has to be cancelled.
        rate = user.tokens_per_second / user.streams if user.tokens_per_second else 20
        max_tokens = int(rate * remaining_seconds)
        await ask(client, user, number, QUESTIONS[question % len(QUESTIONS)], max_tokens)
        question += user.streams


async def ask(
    client: httpx.AsyncClient, user: User, number: int, question: str, max_tokens: int
) -> None:
    """Stream one answer into a user's record."""
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.6,
        "stream": True,
        # One event may carry several tokens or a token without text: the server's count decides.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "vllm_xargs": {"output_rate_user": user.name},
    }
    if user.texts[number]:
        user.texts[number] += "\n"
    start, seen_tokens = time.monotonic(), 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event, now = json.loads(line.removeprefix("data: ")), time.monotonic()
            tokens = event["usage"]["completion_tokens"]
            if tokens and not seen_tokens:
                user.first_token_seconds.append(now - start)
            user.stamps += [now] * (tokens - seen_tokens)
            seen_tokens = tokens
            for choice in event["choices"]:
                user.texts[number] += choice["delta"].get("content") or ""
                if choice["finish_reason"]:
                    user.finish_reasons[choice["finish_reason"]] += 1


def save_stamps(users: Iterable[User], start: float, path: Path) -> None:
    """Save when every token arrived, in seconds from the start, for anybody to judge."""
    record = [vars(user) | {"stamps": [each - start for each in user.stamps]} for user in users]
    path.write_text(json.dumps({"burst_seconds": BURST_SECONDS, "users": record}, indent=1))
