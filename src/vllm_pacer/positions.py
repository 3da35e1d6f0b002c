"""Who is computed in a step in which more requests could be than may be.

The rules:

1. Positions are divided between users by weight; what one cannot use goes to the others.
2. Positions are whole, shares are not. The step owes each user the difference; what is left over
   goes to those that are owed most. So over time everybody has its share exactly.
"""

from collections.abc import Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

U = TypeVar("U", bound=Hashable)

_ROUNDING = 1e-9


class Claim(NamedTuple):
    """How many positions a user could use in this step, and its weight."""

    wanted: int
    weight: float


class Positions(Generic[U]):
    """Divides the positions of one step after another.

    >>> positions = Positions()
    >>> claims = {"a": Claim(8, 1), "b": Claim(8, 2)}
    >>> [positions.divide(4, claims)["a"] for _ in range(6)]
    [1, 2, 1, 1, 2, 1]
    """

    def __init__(self) -> None:
        self._owed: dict[U, float] = {}

    def divide(self, positions: int, claims: Mapping[U, Claim]) -> dict[U, int]:
        """Return each user's positions: no more than it wants, and all of them if possible."""
        shares = fair_shares(positions, claims)
        before = self._owed
        # Who makes no claim is owed nothing: credit is no savings account.
        owed = {user: before.get(user, 0.0) + share for user, share in shares.items()}
        given = {user: int(share + _ROUNDING) for user, share in shares.items()}
        left = min(positions, sum(claim.wanted for claim in claims.values())) - sum(given.values())
        if left:
            for user in sorted(owed, key=lambda user: given[user] - owed[user]):
                if given[user] < claims[user].wanted:
                    given[user] += 1
                    left -= 1
                    if not left:
                        break
        self._owed = {user: owed[user] - given[user] for user in owed}
        return given


def fair_shares(positions: int, claims: Mapping[U, Claim]) -> dict[U, float]:
    """Return the weighted max-min fair shares, which are not whole numbers."""
    shares: dict[U, float] = {}
    left = float(positions)
    weight_left = sum(claim.weight for claim in claims.values())
    for user, claim in sorted(claims.items(), key=lambda each: each[1].wanted / each[1].weight):
        shares[user] = share = min(claim.wanted, left * claim.weight / weight_left)
        left -= share
        weight_left -= claim.weight
    return shares
