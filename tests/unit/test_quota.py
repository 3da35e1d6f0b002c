"""Rates are exact, and everybody has a quota or none."""

from dataclasses import FrozenInstanceError
from fractions import Fraction

import pytest

from vllm_pacer.quota import DEFAULT_BURST_NS, Quota, Quotas


@pytest.mark.parametrize(
    ("rate", "interval_ns"),
    [
        (20, Fraction(50_000_000)),
        ("0.1", Fraction(10_000_000_000)),
        ("0.001", Fraction(1_000_000_000_000)),
        (Fraction(1, 3), Fraction(3_000_000_000)),
        (3, Fraction(1_000_000_000, 3)),
        (1_000_000_000, Fraction(1)),
        (7_000_000_000, Fraction(1, 7)),
    ],
)
def test_the_interval_between_tokens_is_exact(rate, interval_ns: Fraction) -> None:
    """The interval is the exact fraction, also where it is no whole number of nanoseconds."""
    assert Quota.per_second(rate).interval_ns == interval_ns
    assert Quota.per_second(rate).interval_ns * Fraction(rate) == 1_000_000_000


@pytest.mark.parametrize("rate", [0, -1, "-0.5", Fraction(0)])
def test_a_rate_is_above_zero(rate) -> None:
    """No rate at or below zero can be built: it would pause a user for ever."""
    with pytest.raises(ValueError, match="A rate must be above zero: got"):
        Quota.per_second(rate)


@pytest.mark.parametrize("rate", ["", "many", "nan", "inf"])
def test_a_rate_is_a_number(rate: str) -> None:
    """A text that is no finite number is no rate."""
    with pytest.raises(ValueError, match="Invalid literal"):
        Quota.per_second(rate)


def test_a_burst_is_not_negative() -> None:
    """A burst may be zero and no less."""
    assert Quota.per_second(1, burst_ns=0).burst_ns == 0
    with pytest.raises(ValueError, match="A burst must be zero or more: got -1 ns"):
        Quota.per_second(1, burst_ns=-1)


def test_a_quota_cannot_be_changed() -> None:
    """A quota is a value, so one object may serve many users."""
    quota = Quota.per_second(20)
    assert quota == Quota(Fraction(20), DEFAULT_BURST_NS)
    with pytest.raises(FrozenInstanceError):
        quota.burst_ns = 0  # type: ignore[misc]


def test_a_named_user_has_its_own_quota_even_if_that_is_none() -> None:
    """`None` for a named user means no limit, not the default."""
    default, own = Quota.per_second(10), Quota.per_second(20)
    quotas = Quotas(default, {"a": own, "b": None})
    assert quotas.of("a") is own
    assert quotas.of("b") is None
    assert quotas.of("c") is default
    assert Quotas(None, {}).of("c") is None
