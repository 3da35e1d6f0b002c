"""Images and recordings in prompts: none is encoded twice, or lost when a prompt waits."""

import pytest
from engine_bed import ENCODER_TOKENS, Bed

RATE = 5
BUDGET = 32
IMAGE_TOKENS = 24


def image_bed(rates: dict[str, int], is_async: bool, **kwargs: object) -> Bed:
    """Build an engine that encodes and keeps a few images."""
    kwargs = {"max_num_batched_tokens": BUDGET, **kwargs}
    return Bed(rates, is_async=is_async, encoder_tokens=IMAGE_TOKENS, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunked_prefill", [True, False])
@pytest.mark.parametrize("place", [0, 20, 48, 52])
def test_a_paused_prompt_keeps_its_images(
    is_async: bool, place: int, chunked_prefill: bool
) -> None:
    """Wherever the image stands, at the very end too, the user gets its quota and all answers."""
    bed = image_bed(
        {"a": RATE},
        is_async,
        chunked_prefill=chunked_prefill,
        max_num_batched_tokens=BUDGET if chunked_prefill else 2048,
    )
    for index in range(6):
        bed.add("a", prompt=60, tokens=5, images=[(place, 8, f"image-{index}")])
    bed.add("b", prompt=60, tokens=100, images=[(30, 8, "image-b")])
    bed.run()
    assert bed.now_ms <= 30 / RATE * 1000 + 100
    bed.check_window_bound()
    bed.check_empty()


def test_no_chunk_of_a_user_at_its_quota_ends_in_an_image(is_async: bool) -> None:
    """A prompt that ends with an image waits whole: its positions may have to see each other."""
    bed = image_bed({"a": 1}, is_async)
    bed.add("a", prompt=4, tokens=1)
    bed.run()
    name = bed.add("a", prompt=20, tokens=2, images=[(12, 8, "image")])
    bed.run()
    first, *_ = bed.steps_of(name)
    assert first.computed[name] == 20
    bed.check_empty()


def test_images_of_a_paused_prompt_leave_room_for_others(is_async: bool) -> None:
    """While a user at its quota waits with its prompts, others get their images encoded."""
    bed = image_bed({"a": 0.1}, is_async)
    for index in range(8):
        bed.add("a", prompt=40, tokens=5, images=[(10, 20, f"image-{index}")])
    bed.run(until_ms=1000)
    newcomers = [
        bed.add("b", prompt=40, tokens=5, images=[(10, 20, f"other-{index}")]) for index in range(3)
    ]
    bed.run(until_ms=3000)
    assert bed.finished.keys() >= set(newcomers)


def test_with_limits_far_away_every_step_is_stock(is_async: bool) -> None:
    """The same arrivals give the steps of vLLM's own scheduler, images included."""

    def steps(**kwargs: object) -> list[dict[str, int]]:
        bed = Bed(
            is_async=is_async,
            encoder_tokens=IMAGE_TOKENS,
            max_num_batched_tokens=BUDGET,
            fairness=False,
            **kwargs,  # type: ignore[arg-type]
        )
        for index in range(12):
            place = (index * 5) % 30
            name = f"image-{index % 4}"
            bed.add("abc"[index % 3], prompt=40, tokens=10, images=[(place, 8, name)])
            bed.step()
        bed.run()
        bed.check_empty()
        return [step.computed for step in bed.steps]

    assert steps(default_rate=1_000_000_000) == steps(paced=False)


def test_a_recording_is_encoded_when_its_request_begins(is_async: bool) -> None:
    """An encoder-decoder model's prompts wait whole; each recording is encoded with its prompt."""
    bed = Bed(
        {"a": RATE},
        is_async=is_async,
        layers="encoder decoder",
        chunked_prefill=False,
        encoder_tokens=2 * ENCODER_TOKENS,
        num_blocks=40,
        max_num_seqs=4,
    )
    for index in range(10):
        recording = (0, ENCODER_TOKENS, f"recording-{index}")
        bed.add("ab"[index % 2], prompt=6, tokens=20, images=[recording])
    bed.run()
    assert len(bed.finished) == 10
    bed.check_window_bound()
    bed.check_empty()
