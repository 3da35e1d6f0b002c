"""LoRA, served with one slot: paused requests leave it to others, and every answer is right."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from served.client import Answer, Client
from served.rates import steady_ns, tokens_per_second
from served.record import Excerpt
from served.server import API_SERVER, Server, launched, wait_until_ready

from paths import TINY_LLAMA

RANK = 8
ADAPTERS = ("red", "blue")
MODELS = ("m", *ADAPTERS)
PROMPTS = ("Hello", "Once upon a time", "The end")
RATE = 20
SECONDS = 15
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


@dataclass(frozen=True)
class Run:
    """What a limited user with one adapter got beside a free one with the other."""

    limited: Answer
    free: Answer
    excerpt: Excerpt


@pytest.fixture(scope="module")
def run(server: Server) -> Run:
    """Stream both at once."""

    async def stream() -> list[Answer]:
        async with Client(server.url) as client:
            free = asyncio.create_task(
                client.complete("free", "Hi", 1800, model="blue", ignore_eos=True)
            )
            limited = await client.complete(
                "limited", "Hi", RATE * SECONDS, model="red", ignore_eos=True
            )
            return [limited, await free]

    start = server.record.position()
    limited, free = asyncio.run(stream())
    return Run(limited, free, server.record.settled_since(start))


def test_the_limited_user_gets_its_rate(run: Run) -> None:
    """Its adapter has the slot when it has quota, within 0.5 %, whoever else wants it."""
    steps_ns = [step["at_ns"] for step in run.excerpt.steps]
    steady = steady_ns(run.limited.arrivals_ns, steps_ns, RATE)
    assert len(steady) >= RATE * SECONDS / 2
    measured = tokens_per_second(steady)
    print(f"{measured:.3f} tokens/s at a limit of {RATE}, over {len(steady)} tokens")
    assert measured == pytest.approx(RATE, rel=0.005)


def test_the_other_adapter_runs_meanwhile(run: Run) -> None:
    """While the limited user is paused the free one's adapter has the slot."""
    begin, end = run.limited.arrivals_ns[0], run.limited.arrivals_ns[-1]
    between = [at_ns for at_ns in run.free.arrivals_ns if begin <= at_ns <= end]
    assert len(between) > 2 * len(run.limited.arrivals_ns)


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
