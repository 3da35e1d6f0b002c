"""What residents hold, and which of the paused ones gives way when slots or KV blocks run out."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from vllm.v1.request import Request

from vllm_pacer.fairness import FairShare
from vllm_pacer.pauses import Pauses, User

_LOOK_AHEAD_TOKENS = 256
"""How far ahead room is left for residents to grow. Few use all of their `max_tokens`."""

_POSITIONS_PER_TOKEN = 10
"""Positions that may be computed again for one token when requests take turns in the KV cache."""

_recomputation = attrgetter("num_computed_tokens")


class BlockGroup(NamedTuple):
    """How a group of layers takes KV blocks.

    Attributes:
        block_size: Tokens per block.
        most_blocks: The most that a request holds.
        is_constant: Whether it holds them whatever its length.
    """

    block_size: int
    most_blocks: int
    is_constant: bool


class Holdings:
    """The KV blocks of every resident, and the choice of victims.

    Args:
        fair: Decides between users.
        pauses: The paused requests: nobody else gives way.
        groups: The groups of layers, each of which takes blocks of its own.
        draft_tokens: How far blocks reach beyond a request's tokens, for drafts.
        max_model_len: The most tokens of a request.
        class_of: Gives a request's priority class.
        may_be_preempted: Whether a request can be preempted now, and its blocks are free then.
        has_slot: Whether a user has a request with a slot.
    """

    def __init__(
        self,
        fair: FairShare,
        pauses: Pauses[Request],
        groups: Sequence[BlockGroup],
        draft_tokens: int,
        max_model_len: int,
        class_of: Callable[[Request], int],
        may_be_preempted: Callable[[Request], bool],
        has_slot: Callable[[User[Request]], bool],
    ) -> None:
        self._fair = fair
        self._pauses = pauses
        self._groups = groups
        self._draft_tokens = draft_tokens
        self._max_model_len = max_model_len
        self._class_of = class_of
        self._may_be_preempted = may_be_preempted
        self._has_slot = has_slot
        self._blocks_of: dict[Request, int] = {}
        self._growth_of: dict[Request, int] = {}
        self.growth = 0  # the blocks that residents will soon come to hold
        self._tokens_when_preempted: dict[Request, int] = {}

    def blocks(self, tokens: int) -> int:
        """Return how many KV blocks a request with so many tokens fills, at most."""
        tokens += self._draft_tokens
        blocks = 0
        for block_size, most, is_constant in self._groups:
            blocks += most if is_constant else min(-(-tokens // block_size), most)
        return blocks

    # --- what is held -----------------------------------------------------------------------

    def held(self, request: Request) -> int:
        """Return the blocks that a request holds, as far as is known: none if it only waits."""
        return self._blocks_of.get(request, 0)

    def blocks_soon(self, request: Request) -> int:
        """Return the blocks that a request may soon come to hold."""
        most = min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)
        return self.blocks(max(min(most, request.num_tokens + _LOOK_AHEAD_TOKENS), 1))

    def admit(self, user: User[Request], request: Request) -> None:
        """Note that a request becomes resident, or holds KV blocks before it does."""
        blocks = self._blocks_of[request] = self.blocks(request.num_tokens)
        self._fair.admit(user.member, blocks)
        self._growth_of[request] = 0
        self._look_ahead(request)

    def update(self, user: User[Request], request: Request) -> None:
        """Look at what a resident holds now."""
        grown = self.blocks(request.num_computed_tokens) - self._blocks_of[request]
        if grown > 0:
            self._fair.grow(user.member, grown)
            self._blocks_of[request] += grown
            self._look_ahead(request)

    def _look_ahead(self, request: Request) -> None:
        growth = max(self.blocks_soon(request) - self._blocks_of[request], 0)
        self.growth += growth - self._growth_of[request]
        self._growth_of[request] = growth

    def give_back(self, user: User[Request], request: Request) -> int | None:
        """Note that a request is not resident any more; return its blocks, if it was."""
        blocks = self._blocks_of.pop(request, None)
        if blocks is not None:
            self._fair.release(user.member, blocks)
            self.growth -= self._growth_of.pop(request)
        return blocks

    def preempted(self, request: Request) -> None:
        """Note how far a request has come that is being preempted."""
        self._tokens_when_preempted[request] = request.num_output_tokens

    def forget(self, user: User[Request], request: Request, now_ns: int) -> None:
        """Note the end of a request; its room may be kept for its user's next."""
        self._tokens_when_preempted.pop(request, None)
        blocks = self.give_back(user, request)
        if blocks is not None:
            self._fair.keep(user.member, blocks, now_ns)

    # --- who gives way ----------------------------------------------------------------------

    def victim_for_resident(self, worst_class: int) -> Request | None:
        """Return the paused request that gives way to a resident that needs a block."""
        return next((victim for _, victim in self._in_order(worst_class, lambda user: True)), None)

    def victim_for_slot(
        self, user: User[Request], request: Request, tokens_left: Callable[[User[Request]], int]
    ) -> Request | None:
        """Return the paused request that gives its slot to a waiting one, or `None`."""
        victims = self._victims_for(user, request, tokens_left)
        return next(victims, None)

    def victims_for_blocks(
        self,
        user: User[Request],
        request: Request,
        missing: int,
        tokens_left: Callable[[User[Request]], int],
    ) -> list[Request]:
        """Return the paused requests that give a waiting one the blocks it misses, or none.

        To evict some that do not suffice would cost them their blocks for nothing.
        """
        victims = []
        for victim in self._victims_for(user, request, tokens_left):
            victims.append(victim)
            missing -= self._blocks_of[victim]
            if missing <= 0:
                return victims
        return []

    def _victims_for(
        self,
        user: User[Request],
        request: Request,
        tokens_left: Callable[[User[Request]], int],
    ) -> Iterator[Request]:
        """Iterate over those that give way to a waiting request, as if each had done so already.

        A user that has no slot takes turns with one whose tokens are used up. A request
        that was displaced itself waits until its victim has earned its recomputation: else the two
        would compute whole contexts for a token each.
        """
        fair = self._fair
        # One that holds KV blocks without a slot has been counted already.
        is_counted = request in self._blocks_of
        more_slots = 0 if is_counted else 1
        holds_others = user.member.slots > 0 and not (is_counted and not self._has_slot(user))
        more_blocks = self.blocks(request.num_tokens) - self.held(request)
        gone: dict[User[Request], tuple[int, int]] = {}

        def takes_turns(holder: User[Request]) -> bool:
            return not holds_others and fair.share(holder.member) > 0 and not tokens_left(holder)

        def gives_way(holder: User[Request], slots: int, blocks: int) -> bool:
            return fair.gives_way(
                holder.member, slots, blocks, user.member, more_blocks, more_slots
            )

        def may_give_way(holder: User[Request]) -> bool:
            # To look at all that a user has paused takes long: do not, if it will be for nothing.
            return gives_way(holder, 1, 0) or takes_turns(holder)

        for holder, victim in self._in_order(self._class_of(request), may_give_way):
            slots, blocks = gone.get(holder, (0, 0))
            slots, blocks = slots + 1, blocks + self._blocks_of[victim]
            if gives_way(holder, slots, blocks) or (
                takes_turns(holder)
                and (not request.num_preemptions or self._has_earned_recomputation(victim))
            ):
                gone[holder] = slots, blocks
                yield victim

    def _in_order(
        self, worst_class: int, may_give_way: Callable[[User[Request]], bool]
    ) -> Iterator[tuple[User[Request], Request]]:
        """Iterate over the paused requests of some users, of a class no better than `worst_class`.

        First those of the worst class, within it of the user with the greatest share, within that
        the cheapest to compute again. No request gives way twice without a token in between.
        """
        groups = [
            (priority, self._fair.share(user.member), self._pauses.wake_ns(user) or 0, user)
            for user in self._pauses.users()
            for priority in user.paused
            if priority >= worst_class
        ]
        for priority, _, _, user in sorted(groups, key=itemgetter(0, 1, 2), reverse=True):
            if not may_give_way(user):
                continue
            for request in sorted(user.paused[priority], key=_recomputation):
                if self._may_be_preempted(request) and self._has_moved_on(request):
                    yield user, request

    def _has_moved_on(self, request: Request) -> bool:
        return request not in self._tokens_when_preempted or self._new_tokens(request) > 0

    def _has_earned_recomputation(self, request: Request) -> bool:
        return self._new_tokens(request) * _POSITIONS_PER_TOKEN >= request.num_computed_tokens

    def _new_tokens(self, request: Request) -> int:
        """Return how many tokens a request has got since it was preempted last."""
        tokens, before = request.num_output_tokens, self._tokens_when_preempted.get(request, 0)
        return tokens - before if tokens >= before else tokens  # a session's turn counts anew
