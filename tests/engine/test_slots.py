"""The scheduler's outputs replayed through models of the worker's slots, as on a GPU.

The CPU cannot run vLLM's second model runner, the default on GPUs; its slots can be modelled. One
model is the bed's own `Worker`. The other is upstream's, taken out of its test suite where that is
unpacked: its module cannot be imported outside of vLLM's tree.
"""

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import vllm
from engine_bed import EOS, Bed

_UPSTREAM = Path(__file__).parents[2] / ".testbed" / "upstream"


def upstream_slots(max_num_reqs: int) -> Any:
    """Build upstream's own model of the slots."""
    version = vllm.__version__.partition("+")[0]
    path = _UPSTREAM / version / "tests" / "v1" / "core" / "test_worker_slot_overflow.py"
    if not path.exists():
        pytest.skip(f"the tests of vLLM {version} are not unpacked in {path}")
    (slots,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "WorkerSlots"
    )
    names: dict[str, Any] = {}
    exec(compile(ast.Module([slots], []), str(path), "exec"), names)
    return names["WorkerSlots"](max_num_reqs)


class OwnSlots:
    """The slots of the bed's worker; they overflow there, by an assertion of its own."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed

    @property
    def occupied(self) -> frozenset[str]:
        """The requests that hold a slot."""
        return self._bed.executor.worker.residents


@pytest.fixture(params=["own model", "upstream's model"])
def model(request: pytest.FixtureRequest) -> str:
    """Which model of the slots is used."""
    return request.param


def with_slots(bed: Bed, model: str) -> Any:
    """Replay the bed's outputs through a model of the slots and return it."""
    if model == "own model":
        return OwnSlots(bed)
    slots = upstream_slots(bed.max_num_seqs)
    bed.observers.append(slots.apply)
    return slots


def test_paused_request_keeps_its_slot(is_async: bool, model: str) -> None:
    """A paused request holds its slot until it ends."""
    bed = Bed({"a": 1}, is_async=is_async, v2_model_runner=True, max_num_seqs=3)
    slots = with_slots(bed, model)
    paused = [bed.add("a", tokens=2) for _ in range(2)]
    bed.run(until_ms=60)
    bed.add("b", tokens=40)
    bed.run(until_ms=800)
    assert slots.occupied >= {*paused}
    bed.run()
    bed.check_empty()


def test_slots_never_overflow(is_async: bool, model: str) -> None:
    """Under pauses, preemption, aborts and resets no request is admitted without a free slot."""
    chance = random.Random(3)
    bed = Bed(
        {"a": 5, "b": 50},
        is_async=is_async,
        v2_model_runner=True,
        max_num_seqs=6,
        max_num_active_seqs=3,
        num_blocks=40,
        block_size=4,
        max_num_batched_tokens=32,
    )
    slots = with_slots(bed, model)
    for _ in range(400):
        while len(bed.scheduler.requests) < 10:
            bed.add(
                chance.choice("abc"),
                prompt=chance.randint(1, 40),
                tokens=chance.randint(1, 20),
                ends_with=chance.choice([None, EOS]),
            )
        bed.run(until_ms=bed.now_ms + chance.choice([1, 30, 90]))
        if chance.random() < 0.2:
            bed.abort(chance.choice([*bed.scheduler.requests]))
        if chance.random() < 0.05:
            bed.core.reset_prefix_cache(reset_running_requests=True)
        if not any(step.preempted for step in bed.steps[-1:]):
            assert slots.occupied >= {*bed.residents()} - {*_not_dispatched(bed)}
    bed.run()
    assert any(step.preempted for step in bed.steps)
    bed.check_window_bound()
    bed.check_empty()


def _not_dispatched(bed: Bed) -> list[str]:
    """Return the residents that no step has computed since they became resident: none."""
    return [each for each in bed.residents() if not bed.steps_of(each)]


def test_a_turn_that_a_parked_user_leaves_is_not_slept_through(is_async: bool) -> None:
    """With one turn in a step, a better class without quota does not let the engine sleep."""
    bed = Bed(
        {"c": 0.25},
        is_async=is_async,
        step_ms=1,
        max_num_seqs=2,
        max_num_active_seqs=1,
        policy="priority",
    )
    for _ in range(2):
        bed.add("c", prompt=2, tokens=2, priority=1)
    bed.run(until_ms=4)
    name = bed.add("a", prompt=1, tokens=1, priority=1)
    bed.add("c", prompt=1, tokens=1, priority=0)
    bed.run(until_ms=20)
    assert name in bed.finished
