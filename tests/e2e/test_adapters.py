"""LoRA, served with one slot: paused requests leave it to others, and every answer is right."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from served.client import Answer, Client, cancelled
from served.rates import BURST_NS, rate_of
from served.record import Excerpt
from served.server import API_SERVER, Server, launched, wait_until_ready

from paths import TINY_LLAMA

RANK = 8
ADAPTERS = ("red", "blue")
MODELS = ("m", *ADAPTERS)
PROMPTS = ("Hello", "Once upon a time", "The end")
RATE = 10
INTERVAL_NS = 100_000_000
SECONDS = 22
TEXT_TOKENS = 60


@pytest.fixture(scope="module")
def server(vllm_version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two adapters and a slot for one."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS):
        _make_adapter(folder / name, seed)
    command = (
        *("--default-user-output-tokens-per-second", "null"),
        *("--user-output-tokens-per-second", json.dumps({"limited": RATE, "texts": 50})),
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(RANK)),
        *("--lora-modules", *(f"{name}={folder / name}" for name in ADAPTERS)),
    )
    with launched(folder, vllm_version, "sync", API_SERVER, *command) as server:
        wait_until_ready(server)
        yield server


def _make_adapter(folder: Path, seed: int) -> None:
    """Write an adapter of random weights, large enough to change what the model says."""
    model = json.loads((TINY_LLAMA / "config.json").read_text())
    hidden, out = model["hidden_size"], model["num_attention_heads"] * model["head_dim"]
    random = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{part}.weight": torch.randn(
            shape, generator=random
        )
        for layer in range(model["num_hidden_layers"])
        for module in ("q_proj", "v_proj")
        for part, shape in (("A", (RANK, hidden)), ("B", (out, RANK)))
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def run(server: Server) -> Excerpt:
    """What the engine did for a limited user with one adapter beside a free one with the other."""

    async def stream() -> None:
        async with Client(server.url) as client:

            async def keep_asking() -> None:
                while True:
                    await client.complete("free", "Hi", 1800, model="blue", ignore_eos=True)

            free = asyncio.create_task(keep_asking())
            await client.complete("limited", "Hi", RATE * SECONDS, model="red", ignore_eos=True)
            await cancelled([free])

    start = server.record.position()
    asyncio.run(stream())
    return server.record.settled_since(start)


def test_the_limited_user_gets_its_rate(run: Excerpt) -> None:
    """Its adapter has the slot when it has quota, within 0.5 %, whoever else wants it."""
    emitted_ns = run.emission_ns_by_user()["limited"]
    rate = rate_of(emitted_ns, run.steps_ns, RATE, needed_steps=2)  # it has every other one
    rate.check(RATE, least_tokens=200)


def test_a_token_with_quota_waits_for_one_step(run: Excerpt) -> None:
    """As soon as it has quota the limited user has every other step, on a slow machine too."""
    passed_over, most, theoretical_arrival_ns = 0, 0, 0
    steps = [step for step in run.steps if step["computed"]]
    taken = [index for index, step in enumerate(steps) if "limited" in step["taken"]]
    for step in steps[taken[0] : taken[-1]]:
        if "limited" in step["taken"]:
            theoretical_arrival_ns = max(theoretical_arrival_ns, step["at_ns"]) + INTERVAL_NS
            passed_over = 0
        elif theoretical_arrival_ns <= step["at_ns"] + BURST_NS:
            passed_over += 1
            most = max(most, passed_over)
    assert most <= 1


def test_the_other_adapter_runs_meanwhile(run: Excerpt) -> None:
    """While the limited user is paused the free one's adapter has the slot."""
    emitted_ns = run.emission_ns_by_user()
    begin, end = emitted_ns["limited"][0], emitted_ns["limited"][-1]
    between = [at_ns for at_ns in emitted_ns["free"] if begin <= at_ns <= end]
    assert len(between) > 2 * len(emitted_ns["limited"])


@pytest.fixture(scope="module")
def texts(server: Server) -> dict[str, dict[str, list[Answer]]]:
    """The same prompts with every adapter and with none: without a limit, and then all at once."""

    async def ask(user: str, models: tuple[str, ...]) -> dict[str, list[Answer]]:
        async with Client(server.url) as client:
            answers = await asyncio.gather(
                *(
                    client.complete(user, prompt, TEXT_TOKENS, model=model, ignore_eos=True)
                    for model in models
                    for prompt in PROMPTS
                )
            )
        size = len(PROMPTS)
        return {model: answers[size * n : size * (n + 1)] for n, model in enumerate(models)}

    free: dict[str, list[Answer]] = {}
    for model in MODELS:
        free |= asyncio.run(ask("free", (model,)))
    return {"free": free, "limited": asyncio.run(ask("texts", MODELS))}


@pytest.mark.parametrize("model", ADAPTERS)
def test_text_is_the_same(texts: dict[str, dict[str, list[Answer]]], model: str) -> None:
    """Paused, and taking turns with other adapters, a request says what it says alone.

    On this CPU a request without an adapter does not, beside one with an adapter: not on stock.
    """
    for free, limited in zip(texts["free"][model], texts["limited"][model], strict=True):
        assert len(free.token_ids) == TEXT_TOKENS
        assert limited.token_ids == free.token_ids


def test_adapters_say_different_things(texts: dict[str, dict[str, list[Answer]]]) -> None:
    """The adapters change the text, so this is about something."""
    said = {tuple(answers[0].token_ids) for answers in texts["free"].values()}
    assert len(said) == 1 + len(ADAPTERS)
