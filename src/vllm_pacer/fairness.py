"""Who may hold slots and KV blocks when there is not enough for all.

The rules, between users of one priority class:

1. A user's share is the greater of its parts of the slots and of the KV blocks, divided by its
   weight. Whoever has the smallest share is admitted first.
2. A user is entitled to its weight's part of everything, among the users that are present. Beyond
   that, and at its quota, where more residents bring it no more tokens, it is admitted only into
   room that nobody will need: not what is kept for others, nor what residents will grow into.
3. The room that a user within its entitlement leaves is kept for a while, so that its next request
   finds room and nobody has to give way in the moment of need.
4. A holder gives way to a newcomer only if its share is not the smaller of the two even so: nobody
   trades places for nothing.

With one user present nothing is held back but the little that rule 3 keeps, and that not for long.

Sharing by weight, nothing idle while somebody wants it, is max-min fairness; with several resources
and the greatest part as the measure it is dominant resource fairness (Ghodsi et al., NSDI 2011).
"""

from collections import deque
from collections.abc import Mapping

KEEP_NS = 10_000_000_000
"""How long room is kept, in nanoseconds."""

_KEPT_PART = 8
"""At most one slot in so many is kept, and at most one KV block in so many."""


_ROUNDING = 1e-9
"""Far more than sums of weights are rounded by."""


class Member:
    """A user's part of the engine. Changed by `FairShare` alone."""

    __slots__ = ("blocks", "is_present", "kept", "name", "slots", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.is_present = False  # has live requests
        self.slots = 0  # its residents, and what is loaded to become one
        self.blocks = 0  # the KV blocks that they hold
        self.kept: deque[tuple[int, int]] = deque()  # (until_ns, blocks) per slot, oldest first


class FairShare:
    """Keeps account of what each user holds, and decides between users.

    Args:
        slots: The residents that the engine has room for.
        blocks: Its KV blocks.
        weights: The weights that are not one, by user.
        spare_slots: How many more slots than positions in a step there are. No more are kept: an
            engine that could compute in them would lose throughput. All of them if not given.

    >>> fair = FairShare(slots=4, blocks=100, weights={})
    >>> heavy, light = fair.enter("heavy"), fair.enter("light")
    >>> for _ in range(4):
    ...     fair.admit(heavy, blocks=1)
    >>> fair.gives_way(heavy, 1, 1, light, 1)
    True
    """

    def __init__(
        self, slots: int, blocks: int, weights: Mapping[str, float], spare_slots: int | None = None
    ) -> None:
        self._slots = slots
        most = slots // _KEPT_PART
        self._most_kept_slots = most if spare_slots is None else min(most, spare_slots)
        self._blocks = blocks
        self._weights = weights
        self._members: dict[str, Member] = {}
        self._weight: float | None = None  # of all members, if added up
        self._greatest_weight = 0.0  # of any member, if that is known
        self.keepers: deque[tuple[int, Member]] = deque()
        """Until when room is kept for whom, oldest first."""
        self._kept_slots = 0
        self._kept_blocks = 0

    def __len__(self) -> int:
        """Return the number of users that are present or for which room is kept."""
        return len(self._members)

    def enter(self, name: str) -> Member:
        """Return the user's part; the user is present from now on."""
        member = self._members.get(name)
        if member is None:
            member = self._members[name] = Member(name, self._weights.get(name, 1.0))
            self._weight = None
        member.is_present = True
        return member

    def leave(self, member: Member) -> None:
        """Note that the user has no live request any more."""
        member.is_present = False
        self._forget_if_gone(member)

    def admit(self, member: Member, blocks: int) -> None:
        """Note that a request of the user becomes resident."""
        member.slots += 1
        member.blocks += blocks

    def use_kept(self, member: Member) -> None:
        """Note that the user has used the room that was kept for it longest, if any is."""
        if member.kept:
            self._drop_kept(member)

    def grow(self, member: Member, blocks: int) -> None:
        """Note that a resident of the user holds so many blocks more."""
        member.blocks += blocks

    def release(self, member: Member, blocks: int) -> None:
        """Note that a request of the user is no longer resident."""
        member.slots -= 1
        member.blocks -= blocks

    def keep(self, member: Member, blocks: int, now_ns: int) -> None:
        """Keep the room that a finished request has left, if its user is entitled to it."""
        if (
            self._kept_slots < self._most_kept_slots
            and (self._kept_blocks + blocks) * _KEPT_PART <= self._blocks
            and self.is_entitled(member, blocks, slots=len(member.kept) + 1)
        ):
            member.kept.append((now_ns + KEEP_NS, blocks))
            self.keepers.append((now_ns + KEEP_NS, member))
            self._kept_slots += 1
            self._kept_blocks += blocks

    def expire(self, now_ns: int) -> None:
        """Give up the room that was kept long enough."""
        keepers = self.keepers
        while keepers:
            until_ns, member = keepers[0]
            is_used = not member.kept or member.kept[0][0] > until_ns
            if until_ns > now_ns and not is_used:
                break
            keepers.popleft()
            if not is_used:
                self._drop_kept(member)
                self._forget_if_gone(member)

    def next_expiry_ns(self) -> int | None:
        """Return when kept room may be given up next, or `None` if none is kept."""
        return self.keepers[0][0] if self.keepers else None

    def share(self, member: Member, slots: int = 0, blocks: int = 0) -> float:
        """Return the user's share, as if it held so many slots and blocks more."""
        return (
            max((member.slots + slots) / self._slots, (member.blocks + blocks) / self._blocks)
            / member.weight
        )

    def is_entitled(self, member: Member, blocks: int, slots: int = 1) -> bool:
        """Return whether the user stays within its weight's part with so much more."""
        if len(self._members) == 1:
            return True
        return self.share(member, slots, blocks) * self._total_weight() <= 1

    def is_anyone_entitled(self) -> bool:
        """Return whether users are so few that one of the greatest weight has a slot to claim."""
        total = self._total_weight()
        return total <= self._slots * self._greatest_weight * (1 + _ROUNDING)

    def may_admit(self, member: Member, blocks: int, free_slots: int, free_blocks: int) -> bool:
        """Return whether a request that may come to hold so many blocks may become resident.

        Args:
            member: Whose it is.
            blocks: The most that it will hold.
            free_slots: Slots that nobody holds.
            free_blocks: Blocks that nobody holds, less those that residents will come to hold.
        """
        own = member.kept
        kept_slots = self._kept_slots - len(own)
        kept_blocks = self._kept_blocks - sum(blocks for _, blocks in own)
        return free_slots > kept_slots and free_blocks - blocks >= kept_blocks

    def gives_way(
        self,
        holder: Member,
        slots: int,
        blocks: int,
        newcomer: Member,
        more_blocks: int,
        more_slots: int = 1,
    ) -> bool:
        """Return whether a user gives up so much for a request that comes to hold so much more."""
        if holder is newcomer:
            return False
        return self.share(holder, -slots, -blocks) >= self.share(newcomer, more_slots, more_blocks)

    def _total_weight(self) -> float:
        if self._weight is None:
            weights = [each.weight for each in self._members.values()]
            self._weight, self._greatest_weight = sum(weights), max(weights, default=0.0)
        return self._weight

    def _drop_kept(self, member: Member) -> None:
        _, blocks = member.kept.popleft()
        self._kept_slots -= 1
        self._kept_blocks -= blocks

    def _forget_if_gone(self, member: Member) -> None:
        if not (member.is_present or member.kept):
            del self._members[member.name]
            self._weight = None


class FirstCome(FairShare):
    """vLLM's own order: nobody has a share, and nobody gives way to a waiting request."""

    def share(self, member: Member, slots: int = 0, blocks: int = 0) -> float:
        """Return the same for everybody."""
        return 0.0

    def keep(self, member: Member, blocks: int, now_ns: int) -> None:
        """Keep nothing."""

    def may_admit(self, member: Member, blocks: int, free_slots: int, free_blocks: int) -> bool:
        """Return true: vLLM finds out whether there is room."""
        return True

    def gives_way(
        self,
        holder: Member,
        slots: int,
        blocks: int,
        newcomer: Member,
        more_blocks: int,
        more_slots: int = 1,
    ) -> bool:
        """Return false."""
        return False
