"""LoRA adapters: a paused request keeps none from others, and never do more run than fit."""

import random

import pytest
from engine_bed import Bed

RATE = 10
SECONDS = 20


def test_another_adapter_runs_while_one_is_paused(is_async: bool) -> None:
    """With one slot A pauses, B comes in and A goes on: both are served, A at its rate."""
    bed = Bed({"a": RATE}, is_async=is_async, max_loras=1)
    paced = bed.add("a", tokens=10_000, adapter=1)
    bed.run(until_ms=500)
    free = bed.add("b", tokens=10_000, adapter=2)
    bed.run(until_ms=500 + SECONDS * 1000)
    assert len(bed.answers[paced]) >= RATE * SECONDS
    bed.check_window_bound()
    steps = len([step for step in bed.steps if step.computed])
    assert len(bed.answers[free]) >= (steps - len(bed.steps_of(paced))) * 0.95


def test_adapters_of_limited_users_all_reach_their_rates(is_async: bool) -> None:
    """Four users with an adapter each share two slots, and each gets its quota."""
    bed = Bed(dict.fromkeys("abcd", 8), is_async=is_async, max_loras=2, step_ms=20)
    for number, user in enumerate("abcd", start=1):
        for _ in range(2):
            bed.add(user, tokens=10_000, adapter=number)
    bed.run(until_ms=SECONDS * 1000)
    for user in "abcd":
        assert 8 * SECONDS - 2 <= bed.books.delivered[user] <= 8 * SECONDS + 2
    bed.check_window_bound()


def test_residents_with_more_adapters_than_fit_take_turns(is_async: bool) -> None:
    """Unlimited users share the slot in equal parts, whoever came first."""
    bed = Bed({"a": 1}, is_async=is_async, max_loras=1)
    bed.add("a", tokens=3, adapter=1)
    bed.run(until_ms=200)
    names = [bed.add(user, tokens=10_000, adapter=2 + index) for index, user in enumerate("bc")]
    bed.run(until_ms=20_000)
    first, second = (len(bed.answers[name]) for name in names)
    assert bed.finished.keys() >= {"a-0"}
    assert abs(first - second) <= 2
    assert first + second > 600


@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_with_limits_far_away_every_step_is_stock(is_async: bool, max_loras: int) -> None:
    """Adapters wait for their slot as on stock when nobody is paused."""

    def steps(**kwargs: object) -> list[dict[str, int]]:
        bed = Bed(is_async=is_async, max_loras=max_loras, fairness=False, **kwargs)  # type: ignore[arg-type]
        for index in range(9):
            bed.add(
                "abc"[index % 3], tokens=5 + index, adapter=1 + index % 4 if index % 5 else None
            )
        bed.run()
        bed.check_empty()
        return [step.computed for step in bed.steps]

    assert steps(default_rate=1_000_000_000) == steps(paced=False)


@pytest.mark.parametrize("seed", range(6))
def test_prompts_without_room_keep_no_adapter_from_others(is_async: bool, seed: int) -> None:
    """Newcomers with other adapters that do not fit into the KV cache let a prompt go on."""
    dice = random.Random(seed)
    bed = Bed(
        {"b": 17},
        is_async=is_async,
        max_loras=1,
        num_blocks=dice.choice([16, 18, 20, 22]),
        block_size=4,
        max_num_batched_tokens=16,
        max_num_active_seqs=5,
    )
    for _ in range(14):
        user = dice.choice("abbc")
        adapter = "abc".index(user) + 1 if dice.random() < 0.9 else None
        bed.add(user, prompt=dice.choice([30, 40, 45, 48]), tokens=4, adapter=adapter)
        for _ in range(dice.choice([0, 1, 3])):
            bed.step()
    bed.run(most_steps=2_000)
    assert len(bed.finished) == 14
    bed.check_empty()
