"""Users without a limit are scheduled exactly as vLLM's own scheduler would."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine_bed import EOS, STOP, Bed, StepRecord
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

USERS = ("a", "b", "c")
LIMITS = {
    "no limits": {},
    "limits far away": dict.fromkeys(USERS, 1_000_000_000),
    "limits for somebody else": {"absent": 1},
}


@dataclass(frozen=True)
class Arrival:
    """A request and when it arrives; `aborted_after` steps its client gives up."""

    at_step: int
    aborted_after: int | None
    request: dict[str, Any]


arrivals = st.lists(
    st.builds(
        Arrival,
        at_step=st.integers(0, 20),
        aborted_after=st.none() | st.integers(0, 10),
        request=st.fixed_dictionaries(
            {
                "user": st.sampled_from(USERS),
                "prompt": st.integers(1, 40) | st.just([7] * 20) | st.just([7] * 16 + [8]),
                "tokens": st.integers(1, 15),
                "ends_with": st.sampled_from([None, EOS, STOP]),
                "priority": st.integers(0, 2),
            }
        ),
    ),
    min_size=1,
    max_size=25,
)

settings_of_bed = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["fcfs", "priority"]),
        "chunked_prefill": st.booleans(),
        "v2_model_runner": st.booleans(),
        "max_num_seqs": st.integers(4, 8),
        "max_num_active_seqs": st.integers(1, 4),
        "num_blocks": st.integers(16, 40),
        "drafts_and_stages": st.sampled_from([(0, 1), (1, 1), (3, 1), (0, 2), (0, 3), (3, 2)]),
    }
)


def steps_of(
    arrivals: list[Arrival], drafts_and_stages: tuple[int, int], **kwargs: Any
) -> list[StepRecord]:
    """Run the arrivals to their end and return the steps."""
    chunked = kwargs["chunked_prefill"]
    drafts, pipeline = drafts_and_stages
    bed = Bed(
        block_size=4,
        max_num_batched_tokens=16 if chunked else 256,
        drafts=drafts if pipeline == 1 or kwargs["is_async"] else 0,
        pipeline=pipeline,
        **kwargs,
    )
    ordered = sorted(arrivals, key=lambda each: each.at_step)
    aborts: dict[int, list[str]] = {}
    step = 0
    while ordered or bed.has_work:
        while ordered and ordered[0].at_step <= step:
            arrival = ordered.pop(0)
            request_id = bed.add(**arrival.request)
            if arrival.aborted_after is not None:
                aborts.setdefault(step + arrival.aborted_after, []).append(request_id)
        bed.abort(*aborts.get(step, ()))
        if bed.has_work:
            bed.step()
        step += 1
        assert step < 5000
    bed.check_empty()
    return bed.steps


@pytest.mark.parametrize("limits", LIMITS)
def test_without_limits_every_step_is_stock(is_async: bool, limits: str) -> None:
    """With sharing off the same arrivals give the same steps: when, who, and how many tokens."""

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(arrivals=arrivals, kwargs=settings_of_bed)
    def check(arrivals: list[Arrival], kwargs: dict[str, Any]) -> None:
        stock = steps_of(arrivals, paced=False, is_async=is_async, **kwargs)
        ours = steps_of(arrivals, rates=LIMITS[limits], fairness=False, is_async=is_async, **kwargs)
        assert ours == stock
        assert [[*step.computed] for step in ours] == [[*step.computed] for step in stock]

    check()


def test_one_user_has_stock_steps(is_async: bool) -> None:
    """A user that is alone has the steps of stock with sharing on, too."""

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(arrivals=arrivals, kwargs=settings_of_bed)
    def check(arrivals: list[Arrival], kwargs: dict[str, Any]) -> None:
        own = [replace(each, request={**each.request, "user": "a"}) for each in arrivals]
        stock = steps_of(own, paced=False, is_async=is_async, **kwargs)
        ours = steps_of(own, default_rate=1_000_000, is_async=is_async, **kwargs)
        assert ours == stock
        assert [[*step.computed] for step in ours] == [[*step.computed] for step in stock]

    check()


def test_limited_user_leaves_the_others_as_stock(is_async: bool) -> None:
    """Beside a user that never gets a token the others' steps are those of stock without it."""
    alone = Bed(paced=False, is_async=is_async)
    beside = Bed({"a": 0.001}, is_async=is_async)
    beside.add("a", prompt=1, tokens=1)
    beside.run()
    for index in range(3):
        beside.add("a", prompt=1, tokens=1, request_id=f"limited-{index}")
    beside.step()
    begin, begin_ns = len(beside.steps), beside.now_ns
    for bed in (alone, beside):
        for index in range(5):
            bed.add("b", prompt=20 + index, tokens=10, request_id=f"b-{index}")
        bed.run(until_ms=bed.now_ms + 1000)
    assert all(f"b-{index}" in beside.finished for index in range(5))
    assert computed_steps(beside.steps[begin:], begin_ns) == computed_steps(alone.steps, 0)


def computed_steps(steps: list[StepRecord], begin_ns: int) -> list[tuple[int, dict[str, int]]]:
    """Return when, after `begin_ns`, what was computed; without the steps that computed nothing."""
    return [(step.at_ns - begin_ns, step.computed) for step in steps if step.computed]
