"""A pause changes when tokens come, never which."""

import asyncio
from dataclasses import dataclass

import pytest
from served.client import Answer, Client, Prompt
from served.record import Excerpt
from served.server import Server

SHARED_PREFIX = [200 + index * 7 % 3800 for index in range(1200)]
PROMPTS: list[Prompt] = [
    "Hello",
    "The quick brown fox jumps over the lazy dog",
    "Once upon a time there was a scheduler",
    [17],
    [42, 43],
    list(range(500, 628)),
    list(range(500, 629)),
    list(range(3000, 3257)),
    SHARED_PREFIX,
    [*SHARED_PREFIX, 9],
    [*SHARED_PREFIX, 10, 11, 12],
    [*SHARED_PREFIX[:640], *range(700, 800)],
    [*SHARED_PREFIX[:640], *range(800, 1300)],
    list(range(1000, 2700)),
]
MAX_TOKENS = 60


@dataclass(frozen=True)
class Comparison:
    """The same prompts without a limit and with one."""

    free: list[Answer]
    paused: list[Answer]
    excerpt: Excerpt


@pytest.fixture(scope="module")
def comparison(servers: dict[str, Server]) -> Comparison:
    """Ask everything twice, all at once, of the same server."""
    server = servers["roomy"]
    free = asyncio.run(_ask(server.url, "free"))
    start = server.record.position()
    paused = asyncio.run(_ask(server.url, "texts"))
    return Comparison(free, paused, server.record.settled_since(start))


async def _ask(url: str, user: str) -> list[Answer]:
    async with Client(url) as client:
        return await asyncio.gather(
            *(client.complete(user, prompt, MAX_TOKENS) for prompt in PROMPTS)
        )


def test_every_request_was_paused(comparison: Comparison) -> None:
    """With the limit there are steps in which all but one of the prompts wait paused."""
    assert max(step["paused"] for step in comparison.excerpt.steps) >= len(PROMPTS) - 1


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_text_is_the_same(comparison: Comparison, index: int) -> None:
    """At temperature 0 the paused request gives the tokens and text of the unlimited one."""
    free, paused = comparison.free[index], comparison.paused[index]
    assert paused.token_ids == free.token_ids
    assert paused.text == free.text


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_finish_reason_is_the_model_s(comparison: Comparison, index: int) -> None:
    """A paused request ends for the model's reason, at the model's length."""
    free, paused = comparison.free[index], comparison.paused[index]
    assert paused.finish_reason == free.finish_reason
    assert paused.finish_reason in ("stop", "length")
    assert paused.completion_tokens == len(paused.token_ids)
    if paused.finish_reason == "length":
        assert paused.completion_tokens == MAX_TOKENS
