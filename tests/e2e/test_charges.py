"""What users are charged is what left the scheduler for them."""

import asyncio
import random
import re
from dataclasses import dataclass
from typing import Any

import pytest
from served.client import Answer, Client
from served.record import Excerpt
from served.server import Server

USERS = ("a", "b", "c")
EOS = 2
LETTERS = range(81, 107)
"""The tokens of the letters a to z."""
STOP_STRINGS = ["a", "b", "c", "d"]
KINDS: dict[str, dict[str, Any]] = {
    "long": {"ignore_eos": True},
    "prefix": {"ignore_eos": True},
    "short": {"ignore_eos": True},
    "eos": {},
    "stop token": {"stop_token_ids": [*range(81, 91)]},
    "stop string": {"stop": STOP_STRINGS},
    "cancelled": {"ignore_eos": True},
}
PREFIX = [300 + index * 11 % 3500 for index in range(320)]
ROUNDS = 1
STREAMS_PER_USER = 6

PAUSED = "vllm_pacer:paused_requests"
CHARGED = "vllm_pacer:charged_tokens_total"
REFUNDED = "vllm_pacer:refunded_tokens_total"


@dataclass
class Request:
    """One request of the mix and what became of it."""

    kind: str
    answer: Answer
    max_tokens: int


@dataclass(frozen=True)
class Mix:
    """All requests, and what the engine did for them."""

    requests: list[Request]
    excerpt: Excerpt
    metrics_before: dict[str, float]
    metrics_after: list[dict[str, float]]

    def emitted(self, request: Request) -> int:
        """Return the tokens that left the scheduler for a request."""
        return sum(
            tokens
            for name, tokens in self.excerpt.emitted_by_request.items()
            if re.match(re.escape(request.answer.request_id) + r"\b", name)
        )


@pytest.fixture(scope="module")
def mix(servers: dict[str, Server]) -> Mix:
    """Three users with six streams each send every kind of request to an engine short of KV."""
    server = servers["small"]
    before = server.metrics()
    start = server.record.position()
    requests = asyncio.run(_send_all(server.url))
    excerpt = server.record.settled_since(start)
    # Asked often, on new connections, both API servers answer.
    return Mix(requests, excerpt, before, [server.metrics() for _ in range(12)])


async def _send_all(url: str) -> list[Request]:
    async with Client(url) as client:

        async def stream(user: str, seed: int) -> list[Request]:
            dice = random.Random(seed)
            kinds = [*KINDS] * ROUNDS
            dice.shuffle(kinds)
            return [await _send(client, user, kind, dice) for kind in kinds]

        sent = await asyncio.gather(
            *(
                stream(user, seed * 10 + number)
                for number, user in enumerate(USERS)
                for seed in range(STREAMS_PER_USER)
            )
        )
    return [request for each in sent for request in each]


async def _send(client: Client, user: str, kind: str, dice: random.Random) -> Request:
    prompt = PREFIX[: dice.choice([64, 320])] + _some_tokens(dice, 1, 40)
    if kind == "long":
        prompt = _some_tokens(dice, 300, 700)
    parameters = {
        # A model without weights writes letters by chance, so that its answers end by chance. No
        # seed: on CPU, vLLM 0.32 fails at a seeded request whose prefill is chunked.
        "allowed_token_ids": [*LETTERS, EOS],
        "temperature": 1,
        **KINDS[kind],
    }
    # Those with a prefix grow by blocks while the cache is full, so that somebody has to give way.
    lengths = {"short": (1, 3), "prefix": (100, 140)}
    max_tokens = dice.randint(*lengths.get(kind, (10, 40)))
    stop_after = dice.randint(1, max_tokens) if kind == "cancelled" else None
    answer = await client.complete(user, prompt, max_tokens, stop_after=stop_after, **parameters)
    return Request(kind, answer, max_tokens)


def _some_tokens(dice: random.Random, least: int, most: int) -> list[int]:
    return [dice.randint(200, 4000) for _ in range(dice.randint(least, most))]


def test_pause_and_preemption_both_happened(mix: Mix) -> None:
    """The mix reaches what it is meant to: paused requests, and paused ones that lose their KV."""
    assert max(step["paused"] for step in mix.excerpt.steps) > 5
    displaced = [line for line in mix.excerpt.preempted if line["was_paused"]]
    print(f"{len(displaced)} paused requests were preempted")
    assert displaced


def test_every_kind_of_end_happened(mix: Mix) -> None:
    """Each kind of request ended in the way it is there for, at least once."""
    reasons = {(each.kind, each.answer.finish_reason) for each in mix.requests}
    assert {("eos", "stop"), ("stop token", "stop"), ("stop string", "stop")} <= reasons
    assert {("long", "length"), ("short", "length"), ("cancelled", None)} <= reasons


@pytest.mark.parametrize("user", USERS)
def test_charges_are_emitted_and_aborted_in_flight(mix: Mix, user: str) -> None:
    """Charged and not refunded = emitted + in flight when the client hung up, exactly."""
    excerpt = mix.excerpt
    kept = excerpt.charged_by_user[user] - excerpt.refunded_by_user[user]
    assert kept == excerpt.emitted_by_user[user] + excerpt.aborted_in_flight_by_user[user]


def test_emitted_and_billed_differ_only_past_a_stop_string_or_abort(mix: Mix) -> None:
    """Per request, emitted - completion_tokens is the tokens past a stop string or an abort."""
    past_the_end = {}
    for request in mix.requests:
        answer = request.answer
        billed = answer.completion_tokens
        unbilled = mix.emitted(request) - (len(answer.token_ids) if billed is None else billed)
        if unbilled:
            past_the_end[answer.request_id] = request.kind, unbilled
    print("tokens past the end, by request:", past_the_end)
    assert all(tokens > 0 for _, tokens in past_the_end.values())
    assert {kind for kind, _ in past_the_end.values()} <= {"stop string", "cancelled"}


def test_every_answer_is_complete(mix: Mix) -> None:
    """Nothing is cut: an answer ends at its length, its stop token, or just before its string."""
    for request in mix.requests:
        answer = request.answer
        assert answer.status == 200, answer.body
        if request.kind == "cancelled":
            continue
        assert answer.completion_tokens == len(answer.token_ids)
        if answer.finish_reason == "length":
            assert answer.completion_tokens == request.max_tokens
            continue
        assert answer.finish_reason == "stop"
        if request.kind == "stop string":
            assert not set(answer.text) & set(STOP_STRINGS)
        else:
            last_token = answer.token_ids[-1]
            assert last_token == EOS or last_token in KINDS[request.kind]["stop_token_ids"]


def test_metrics_agree_with_the_run(mix: Mix) -> None:
    """Whichever API server answers, `/metrics` shows what was charged and refunded."""
    charged = sum(mix.excerpt.charged_by_user.values())
    refunded = sum(mix.excerpt.refunded_by_user.values())
    for after in mix.metrics_after:
        assert after.get(PAUSED) == 0
        assert after[CHARGED] - mix.metrics_before[CHARGED] == charged
        assert after[REFUNDED] - mix.metrics_before[REFUNDED] == refunded
