"""Dividing positions: the shares are weighted max-min fair, and over time exactly so."""

import random

import pytest

from vllm_pacer.positions import Claim, Positions, fair_shares


def test_what_one_cannot_use_goes_to_the_others() -> None:
    """A small claim is met in full, the rest is divided by weight."""
    claims = {"small": Claim(1, 1), "one": Claim(100, 1), "two": Claim(100, 2)}
    assert fair_shares(10, claims) == pytest.approx({"small": 1, "one": 3, "two": 6})


def test_nobody_gets_more_than_it_can_use() -> None:
    """With room for all, everybody gets what it wants."""
    assert Positions().divide(10, {"a": Claim(2, 1), "b": Claim(3, 5)}) == {"a": 2, "b": 3}


def test_no_claims() -> None:
    """Nothing is divided among nobody."""
    assert Positions().divide(4, {}) == {}


def test_over_time_everybody_has_its_share() -> None:
    """Eight positions at weights 1 : 2 : 4 are 8/7, 16/7 and 32/7 a step, within two in all."""
    positions: Positions[str] = Positions()
    claims = {"a": Claim(8, 1), "b": Claim(8, 2), "c": Claim(8, 4)}
    given = dict.fromkeys(claims, 0)
    for _ in range(700):
        for user, count in positions.divide(8, claims).items():
            given[user] += count
    assert given == pytest.approx({"a": 800, "b": 1600, "c": 3200}, abs=2)


def test_more_users_than_positions_take_turns() -> None:
    """Ten users and three positions: everybody has its third turn after ten steps."""
    positions: Positions[int] = Positions()
    served = [0] * 10
    for _ in range(10):
        given = positions.divide(3, {user: Claim(1, 1) for user in range(10)})
        assert sum(given.values()) == 3
        for user, count in given.items():
            served[user] += count
    assert served == [3] * 10


def test_whoever_makes_no_claim_saves_nothing() -> None:
    """A user that stayed away is owed nothing when it comes back."""
    positions: Positions[str] = Positions()
    alone = {"a": Claim(1, 1), "b": Claim(1, 1)}
    for _ in range(3):
        positions.divide(1, alone)
    positions.divide(1, {"a": Claim(5, 1)})
    given = [positions.divide(1, alone) for _ in range(4)]
    assert sum(each["b"] for each in given) == 2


def test_all_positions_are_used_and_no_claim_is_exceeded() -> None:
    """For any claims: as many positions as are wanted and there, nobody more than it wants."""
    chance = random.Random(1)
    for _ in range(300):
        positions: Positions[int] = Positions()
        for _ in range(5):
            claims = {
                user: Claim(chance.randint(0, 9), chance.choice([0.001, 0.3, 1, 7, 1000]))
                for user in range(chance.randint(0, 12))
            }
            total = chance.randint(0, 20)
            given = positions.divide(total, claims)
            assert all(0 <= given[user] <= claims[user].wanted for user in claims)
            wanted = sum(claim.wanted for claim in claims.values())
            assert sum(given.values()) == min(total, wanted)
