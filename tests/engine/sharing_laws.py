"""What the rules of sharing promise of every instant, checked against what vLLM itself holds.

The scheduler's books are compared with its residents and its KV manager, and its decisions with the
rules, written down here once more from `docs/sharing.md`:

* a user is booked with the slots and the KV blocks that its residents hold, paused ones exactly;
* room is kept for users with a claim to it, at most an eighth of all, and not beyond its time;
* whoever gives way is paused and has received a token since it did so last;
* a resident gives way to a waiting request only of a class that is not worse, and only if its
  user's share stays the greater one, or if it takes turns;
* the engine does not sleep while somebody could go on.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from vllm_pacer.config import PacerConfig
from vllm_pacer.fairness import KEEP_NS

KEPT_PART = 8


class Watched(Protocol):
    """What these laws need of a bed."""

    scheduler: Any
    pacing: PacerConfig
    answers: dict[str, list[int]]

    def user_of(self, request_id: str) -> str:
        """Return whose request it is."""


class SharingLaws:
    """The laws of one scheduler, watched from its first step on."""

    def __init__(self, bed: Watched) -> None:
        self.preemptions: Counter[str] = Counter()  # by request
        self._bed = bed
        self._scheduler = bed.scheduler
        self._answered_when_preempted: dict[str, int] = {}
        self._watch_preemptions()
        self._watch_choice_of_victims()

    # --- what is held -------------------------------------------------------------------------

    def check(self) -> None:
        """Check what the scheduler has booked."""
        self._check_holdings()
        self._check_kept_room()

    def _check_holdings(self) -> None:
        scheduler = self._scheduler
        holdings, fair = scheduler._holdings, scheduler._fair
        pauses = scheduler._pauses.requests
        booked = holdings._blocks_of
        holders = {*scheduler.running, *scheduler.kv_holding_waiting}
        assert booked.keys() == holders, "residents and holdings differ"
        slots: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for request, count in booked.items():
            held = len(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])
            tokens = max(request.num_tokens, request.num_computed_tokens)
            # Drafts that were in flight when it was looked at, and have been rejected since.
            needed = holdings.blocks(tokens + 2 * scheduler.num_spec_tokens)
            assert count <= needed, f"{request.request_id} is booked with too many blocks"
            if request in pauses:
                assert count >= held, f"{request.request_id} is booked with too few blocks"
            user = self._bed.user_of(request.request_id)
            slots[user] += 1
            blocks[user] += count
        for name, member in fair._members.items():
            assert (member.slots, member.blocks) == (slots[name], blocks[name]), name
            assert member.is_present == (name in scheduler._users)
            assert member.is_present or member.kept
        assert scheduler._users.keys() <= fair._members.keys()
        assert holdings._growth_of.keys() == booked.keys()
        assert holdings.growth == sum(holdings._growth_of.values())
        assert all(growth >= 0 for growth in holdings._growth_of.values())

    def _check_kept_room(self) -> None:
        fair, now_ns = self._scheduler._fair, self._scheduler._now_ns
        kept = [each for member in fair._members.values() for each in member.kept]
        assert fair._kept_slots == len(kept)
        assert fair._kept_blocks == sum(blocks for _, blocks in kept)
        assert all(blocks >= 0 for _, blocks in kept)
        assert fair._kept_slots * KEPT_PART <= fair._slots
        assert fair._kept_blocks * KEPT_PART <= fair._blocks
        latest_ns = self._bed.scheduler.now_ns() + KEEP_NS
        assert all(now_ns < until_ns <= latest_ns for until_ns, _ in kept), "kept for too long"

    # --- who gives way ------------------------------------------------------------------------

    def _watch_preemptions(self) -> None:
        scheduler, answered = self._scheduler, self._answered_when_preempted
        preempt, evict = scheduler._preempt_request, scheduler._evict

        def watched_preempt(request: Request, *args: Any, **kwargs: Any) -> None:
            preempt(request, *args, **kwargs)
            self.preemptions[request.request_id] += 1
            answered[request.request_id] = len(self._bed.answers[request.request_id])

        def watched_evict(victim: Request) -> None:
            name = victim.request_id
            assert victim in scheduler._pauses.requests, f"{name} gives way and is not paused"
            assert len(self._bed.answers[name]) > answered.get(name, -1), (
                f"{name} gives way twice without a token in between"
            )
            evict(victim)

        scheduler._preempt_request, scheduler._evict = watched_preempt, watched_evict

    def _watch_choice_of_victims(self) -> None:
        holdings = self._scheduler._holdings
        for_slot, for_blocks = holdings.victim_for_slot, holdings.victims_for_blocks

        def watched_for_slot(user: Any, request: Request, tokens_left: Any) -> Request | None:
            victim = for_slot(user, request, tokens_left)
            if victim is not None:
                self._check_victims(user, request, [victim], tokens_left)
            return victim

        def watched_for_blocks(
            user: Any, request: Request, missing: int, tokens_left: Any
        ) -> list[Request]:
            victims = for_blocks(user, request, missing, tokens_left)
            self._check_victims(user, request, victims, tokens_left)
            return victims

        holdings.victim_for_slot, holdings.victims_for_blocks = watched_for_slot, watched_for_blocks

    def _check_victims(
        self,
        user: Any,
        request: Request,
        victims: Sequence[Request],
        tokens_left: Callable[[Any], int],
    ) -> None:
        scheduler = self._scheduler
        assert not victims or self._bed.pacing.fairness, "somebody gives way to a waiting request"
        newcomer = self._bed.user_of(request.request_id)
        gone: set[Request] = set()
        for victim in victims:
            gone.add(victim)
            holder = self._bed.user_of(victim.request_id)
            assert holder != newcomer, "a user gives way to itself"
            if scheduler.policy == SchedulingPolicy.PRIORITY:
                assert victim.priority >= request.priority, "a better class gives way"
            if self.share(holder, without=gone) < self.share(newcomer, plus=request):
                owner = scheduler._owner_of[victim]
                seated = [
                    each
                    for each in scheduler._holdings._blocks_of.keys() - scheduler._loads
                    if self._bed.user_of(each.request_id) == newcomer and each is not request
                ]
                assert not seated, f"{holder} trades places for nothing"
                assert tokens_left(owner) <= 0, f"{holder} gives way with tokens left"

    def share(
        self, user: str, without: set[Request] | None = None, plus: Request | None = None
    ) -> Fraction:
        """Return a user's share, without some of its residents, or with one more, or one whole."""
        scheduler = self._scheduler
        holdings = scheduler._holdings
        slots = blocks = 0
        for request, count in holdings._blocks_of.items():
            if self._bed.user_of(request.request_id) == user and request not in (without or ()):
                slots, blocks = slots + 1, blocks + count
        if plus is not None:
            slots += plus not in holdings._blocks_of
            blocks += holdings.blocks(plus.num_tokens) - holdings.held(plus)
        all_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        part = max(Fraction(slots, scheduler.max_num_running_reqs), Fraction(blocks, all_blocks))
        return part / self._bed.pacing.weights.get(user, 1)

    # --- who sleeps ---------------------------------------------------------------------------

    def check_wait(self, until_ns: int) -> None:
        """Check that nobody could go on before an instant until which the engine would sleep."""
        scheduler = self._scheduler
        if scheduler.pause_state != PauseState.UNPAUSED:
            return
        for user in scheduler._users.values():
            if user.paused:
                ready_ns = scheduler._limiter.account_ready_at_ns(user.account)
                # What is owed to a waiting request is for the paused ones a moment later.
                assert until_ns <= max(ready_ns, scheduler._now_ns + 1), (
                    f"the engine sleeps while {user.account.user} has a token"
                )
        begins_ns = self.begins_ns()
        assert begins_ns is None or until_ns <= max(begins_ns, scheduler._now_ns + 1), (
            "the engine sleeps while a waiting request could begin"
        )

    def begins_ns(self) -> int | None:
        """Return when a waiting request has a token and certainly finds room, or `None`."""
        scheduler = self._scheduler
        waiting = list(scheduler.waiting)
        # A session keeps its slot between two turns.
        loaded = scheduler.finished_recving_kv_req_ids
        holders = [
            each
            for each in scheduler.kv_holding_waiting
            if each.status != RequestStatus.WAITING_FOR_REMOTE_KVS or each.request_id in loaded
        ]
        sessions = [each for each in holders if each.resumable]
        with_slot = [*scheduler.running, *sessions]
        residents = {self._bed.user_of(each.request_id) for each in with_slot}
        if len(with_slot) >= scheduler.max_num_running_reqs:
            return None
        if any(scheduler._missing_blocks(each) > 0 for each in [*holders, *waiting]):
            return None  # who does not fit holds up whoever comes later
        ready_ns = (
            scheduler._limiter.account_ready_at_ns(scheduler._owner_of[each].account)
            for each in waiting
            if self._bed.user_of(each.request_id) not in residents
        )
        return min(ready_ns, default=None)
