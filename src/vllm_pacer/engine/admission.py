"""vLLM's scheduler, with users that share its slots and KV blocks.

The rules:

1. What is admitted, and in which order, is for the waiting queue, which asks here whether a request
   may become resident. What has no room is not offered.
2. A full house gives way ahead of vLLM's look at the queue; when KV blocks run out, it gives way in
   the middle of it. Only paused requests do.
3. `FairShare` decides between users who may hold what. Nothing is decided in the order of vLLM's
   lists.
4. A user begins no load of a prompt for which it has no token, beside the loads that it holds:
   until a load has ended and its request has come in, nobody can make it give its blocks back.
"""

from itertools import chain
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import CrossAttentionSpec, MambaSpec
from vllm.v1.request import Request, RequestStatus

from vllm_pacer.clock import NS_PER_SECOND, Clock, MonotonicClock
from vllm_pacer.config import PacerConfig
from vllm_pacer.engine.holdings import BlockGroup, Holdings
from vllm_pacer.engine.identity import user_of
from vllm_pacer.engine.seams import check_scheduler_attributes
from vllm_pacer.engine.waiting import WaitingQueue
from vllm_pacer.fairness import FairShare, FirstCome, Member
from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.pauses import Pauses, User

_SOON_NS = NS_PER_SECOND
"""Whoever waits for a token that comes later has no claim to room yet."""

_COMPILING = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class AdmittingScheduler(Scheduler):
    """vLLM's scheduler with users that share slots and KV blocks.

    Args:
        pacing: The quotas and weights.
        clock: What tells the time.
        kwargs: What vLLM's scheduler takes.
    """

    # vLLM's own attributes, changed while it schedules.
    max_num_active_reqs: int
    running: list[Request]

    def __init__(self, *args: Any, pacing: PacerConfig, clock: Clock | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_scheduler_attributes(self)
        self._pacing = pacing
        self._on_cpu = current_platform.is_cpu()
        self._most_tokens = 1 + self.num_spec_tokens  # that a step can give a request
        self._clock = clock or MonotonicClock()
        self._limiter = OutputRateLimiter(pacing.quotas().of)
        self._pauses: Pauses[Request] = Pauses(self._limiter)
        self._users: dict[str, User[Request]] = {}
        self._owner_of: dict[Request, User[Request]] = {}
        # Without those whose token another engine delivers, and charges.
        self._payer_of: dict[Request, User[Request]] = {}
        self._loads: set[Request] = set()  # those with KV blocks that have not had a slot yet
        self._nobody: User[Request] = User(Account("", None), Member("", 1))  # samples nothing
        sharing = FairShare if pacing.fairness else FirstCome
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        weights = {user: float(weight) for user, weight in pacing.weights.items()}
        self._active_limit: int = self.max_num_active_reqs
        slots = self.max_num_running_reqs
        self._fair = sharing(slots, blocks, weights, slots - self._active_limit)
        self._holdings = Holdings(
            self._fair,
            self._pauses,
            self._block_groups(),
            self._draft_reach_tokens(),
            self.max_model_len,
            self._priority_class,
            self._may_be_preempted,
            self._has_slot,
        )
        self.waiting = WaitingQueue(
            self._register,
            self.policy == SchedulingPolicy.PRIORITY,
            lambda user: self._fair.share(user.member),
            self._may_admit,
            self._admit,
            self._take_back,
        )
        self._allocate_slots = self.kv_cache_manager.allocate_slots

        # Of the current step, or the last one between two.
        self._now_ns = 0
        self._step = 0
        self._watched: dict[User[Request], None] = {}
        self._promised: dict[User[Request], int] = {}
        self._promised_last: Request | None = None
        self._prefills: dict[User[Request], Request] = {}  # one in progress, if limited
        self._held_back: list[Request] = []
        self._is_hiding = False
        self._other_waits = False  # for something else than quota
        self._skipped_until_ns: int | None = None  # when one that holds KV blocks has quota
        self._claimed: dict[int, tuple[int, int]] | None = None  # by waiting users, if looked at
        self._sessions: list[Request] = []  # that waited with their slot when the step began
        self._next_time: set[User[Request]] = set()  # those that no position was left to
        self._no_newcomer_before: dict[User[Request], int] = {}  # step

    def _block_groups(self) -> list[BlockGroup]:
        """Return how each group of layers takes KV blocks; a window or a state takes few."""
        managers = self.kv_cache_manager.coordinator.single_type_managers
        specs = [manager.kv_cache_spec for manager in managers]
        return [
            BlockGroup(
                manager.block_size,
                spec.max_memory_usage_bytes(self.vllm_config) // spec.page_size_bytes,
                is_constant=isinstance(spec, MambaSpec | CrossAttentionSpec),
            )
            for manager, spec in zip(managers, specs, strict=True)
        ]

    def _draft_reach_tokens(self) -> int:
        """Return how far KV blocks reach beyond a request's tokens, for drafts in flight."""
        drafts = self.num_spec_tokens * self.vllm_config.max_concurrent_batches
        return drafts + self.num_lookahead_tokens

    # --- who is there --------------------------------------------------------------------------

    def _register(self, request: Request) -> User[Request]:
        if request.sampling_params is None:
            return self._nobody
        user = self._owner_of.get(request)
        if user is None:
            account = self._limiter.account(user_of(request.sampling_params))
            user = self._users.get(account.user)
            if user is None:
                user = User(account, self._fair.enter(account.user))
                self._users[account.user] = user
            account.requests += 1
            self._owner_of[request] = user
            if not self._is_prefill_for_another_engine(request):
                self._payer_of[request] = user
        self._watch(user)  # also for a session that comes back to the queue
        return user

    def _owner(self, request: Request) -> User[Request]:
        return self._owner_of.get(request, self._nobody)

    def _is_prefill_for_another_engine(self, request: Request) -> bool:
        """Whether another engine samples the request's token again, and delivers it."""
        params = request.kv_transfer_params if self.connector is not None else None
        is_for_another = bool(params and params.get("do_remote_decode"))
        return is_for_another and request.max_tokens == 1 and not request.resumable

    def _priority_class(self, request: Request) -> int:
        return request.priority if self.policy == SchedulingPolicy.PRIORITY else 0

    def _is_sharing(self) -> bool:
        return self._pacing.fairness and len(self._users) > 1

    def _unpark(self, user: User[Request]) -> None:
        if self.waiting.is_parked(user):
            self.waiting.unpark(user)
            self._watch(user)

    def _watch(self, user: User[Request]) -> None:
        if user.account.limited:
            self._watched[user] = None

    def _ignore_if_idle(self, user: User[Request]) -> None:
        """Stop watching a user if all its requests are paused or parked.

        None of them can take a token before it goes on, has a turn again or comes in, and each of
        these watches the user.
        """
        idle = sum(map(len, user.paused.values()))
        if self.waiting.is_parked(user):
            idle += self.waiting.length_of(user)
        if idle == user.account.requests:
            self._watched.pop(user, None)

    def _tokens_left(self, user: User[Request]) -> int:
        return self._limiter.available(user.account) - self._promised.get(user, 0)

    def _has_quota(self, request: Request) -> bool:
        """Whether a token may be promised to the request in this step."""
        payer = self._payer_of.get(request)
        return payer not in self._watched or self._tokens_left(payer) > 0

    def _needs_token(self, request: Request) -> bool:
        """Whether a resident takes a token the next time that it is computed."""
        return request in self._payer_of and not is_mid_prefill(request)

    def _has_plenty(self, user: User[Request]) -> bool:
        """Whether the user has a token for each of its requests."""
        return user not in self._watched or self._tokens_left(user) >= user.account.requests

    # --- who gets in ---------------------------------------------------------------------------

    def _admit(self, user: User[Request], request: Request) -> None:
        """Note that vLLM has taken a request out of the queue."""
        self._holdings.admit(user, request)
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._loads.add(request)
            if request in self._payer_of:
                user.loads += 1

    def _take_back(self, user: User[Request], request: Request) -> None:
        """Note that a request comes back to the queue, and holds nothing any more."""
        self._holdings.give_back(user, request)
        self._end_load(user, request)

    def _end_load(self, user: User[Request], request: Request) -> None:
        if request in self._loads:
            self._loads.discard(request)
            if request in self._payer_of:
                user.loads -= 1

    def _let_in(self, running: list[Request]) -> list[tuple[User[Request], Request]]:
        """Return who may come in: who holds KV blocks already, and each user's first in its line.

        They get a slot. If there is none, a paused request gives way.
        """
        holders = self._block_holders() if self.kv_holding_waiting else []
        is_open = self._pause_state == PauseState.UNPAUSED and self.waiting.has_turns()
        if not (holders or is_open):
            return []
        for request in running:
            self._holdings.update(self._owner(request), request)
        free = self._free_slots()
        if free <= 0 and not self._pauses.requests:
            return []
        newcomers = []
        nobody_has_earned_a_turn = False  # that a displaced request could take
        heads = self.waiting.heads(self._active_limit) if is_open else []
        for user, request in [*((self._owner(each), each) for each in holders), *heads]:
            holds_blocks = request not in self.waiting.requests
            if self._no_newcomer_before.get(user, 0) > self._step:
                continue
            if request.status == _COMPILING and not self._handle_blocked_waiting_request(request):
                continue
            if free > 0:
                if holds_blocks or self._may_admit(user, request):
                    newcomers.append((user, request))
                    free -= 1
            elif holds_blocks or (request.status in _READY and self._allow_or_park(user, request)):
                was_displaced = request.num_preemptions > 0
                if was_displaced and nobody_has_earned_a_turn:
                    continue
                victim = self._holdings.victim_for_slot(user, request, self._tokens_left)
                if victim is not None:
                    self._evict(victim)
                    newcomers.append((user, request))
                elif was_displaced:
                    nobody_has_earned_a_turn = True
                elif not holds_blocks:
                    break  # those that come later have greater shares
        return newcomers

    def _free_slots(self) -> int:
        residents = len(self.running) + self.num_waiting_for_streaming_input
        return max(self.max_num_running_reqs - residents, 0)

    def _block_holders(self) -> list[Request]:
        """Return the waiting requests that hold KV blocks, await nothing and may sample."""
        holders = []
        for request in self.kv_holding_waiting:
            is_loaded = request.request_id in self.finished_recving_kv_req_ids
            if request.status in _READY or is_loaded:
                if self._has_quota(request):
                    holders.append(request)
                else:
                    self._await_quota(request)
        return holders

    def _await_quota(self, request: Request) -> None:
        """Leave its user's next token to a request that holds KV blocks, and wake up for it."""
        user = self._owner(request)
        self._pauses.owe(user)
        ready_ns = self._limiter.account_ready_at_ns(user.account)
        if self._skipped_until_ns is None or ready_ns < self._skipped_until_ns:
            self._skipped_until_ns = ready_ns

    def _may_admit(self, user: User[Request], request: Request) -> bool:
        """Whether the queue may offer a request in this step."""
        return (
            user not in self._next_time
            and not (self._sessions and self._needs_slots_of_sessions())
            and self._has_room(user, request)
            and self._allow_or_park(user, request)
        )

    def _keeps_slot(self, request: Request) -> bool:
        """Whether a request that waits with its KV blocks has a slot, as between two inputs."""
        return request.resumable and request not in self._loads

    def _needs_slots_of_sessions(self) -> bool:
        """Whether all slots are taken, by residents or by sessions that are not computed yet.

        vLLM does not count a session that has its next input and waits, for its adapter say.
        """
        kept = sum(each.status != RequestStatus.RUNNING for each in self._sessions)
        return self._residents() + kept >= self.max_num_running_reqs

    def _residents(self) -> int:
        """Return how many requests have a slot and do not wait, at any time of a step."""
        residents = len(self.running)
        if self._is_hiding:  # else `running` has them all
            residents += len(self._pauses.requests) + len(self._held_back)
        return residents

    def _has_room(self, user: User[Request], request: Request) -> bool:
        member, holdings = user.member, self._holdings
        blocks = holdings.blocks(request.num_tokens)
        is_entitled = self._fair.is_entitled(member, blocks)
        if not member.slots or (is_entitled and not user.paused):
            return True
        others = self.num_waiting_for_streaming_input + len(self._loads)
        free_slots = self.max_num_running_reqs - self._residents() - others
        if self._claimed is None:
            self._claimed = self._claims_of_waiting_users(free_slots)
        slots = claimed = 0
        for priority, of_class in self._claimed.items():
            if priority <= self._priority_class(request):
                slots, claimed = slots + of_class[0], claimed + of_class[1]
        if is_entitled:  # its own claim
            slots, claimed = max(slots - 1, 0), max(claimed - blocks, 0)
        kv_cache = self.kv_cache_manager
        free_blocks = kv_cache.block_pool.get_num_free_blocks() - kv_cache.watermark_blocks
        return self._fair.may_admit(
            member,
            holdings.blocks_soon(request),
            free_slots - slots,
            free_blocks - holdings.growth - claimed,
        )

    def _claims_of_waiting_users(self, free_slots: int) -> dict[int, tuple[int, int]]:
        """Return slots and blocks for the first requests of users within their part, by class."""
        claims: dict[int, tuple[int, int]] = {}
        if not self._fair.is_anyone_entitled():
            return claims
        # If so many claim a slot there is none for others, and it does not matter who else does.
        most = max(free_slots, 0) + 2
        parked = self.waiting.parked(self._now_ns + _SOON_NS)
        for user, request in chain(self.waiting.heads(most), parked):
            needed = self._holdings.blocks(request.num_tokens)
            if self._fair.is_entitled(user.member, needed):
                slots, blocks = claims.get(self._priority_class(request), (0, 0))
                claims[self._priority_class(request)] = slots + 1, blocks + needed
                if slots + 1 == most and self.policy != SchedulingPolicy.PRIORITY:
                    break  # a better class may still come
        return claims

    def _allow_or_park(self, user: User[Request], request: Request) -> bool:
        """Whether the user's quota lets a request begin. If it has no token, the user is parked.

        A user begins no load for which it has no token, beside those that it holds: until a load
        has ended, and its request has come in, nobody can make it give its KV blocks back.
        Beside others a user at its quota begins a prompt for every token that it has, and one at a
        time: its prompts keep pace with its quota and do not fill the steps of others.
        """
        if request not in self._payer_of or self._has_plenty(user):
            return True
        is_alone = len(self._users) == 1
        tokens_left = self._tokens_left(user)
        if tokens_left > 0:
            if tokens_left <= user.loads:
                return False
            return is_alone or not self._pacing.fairness or user not in self._prefills
        if is_alone and self._can_prefill_without_quota(request):
            return True
        if not (user.loads or self._has_better_resident(user, self._priority_class(request))):
            self._pauses.owe(user)
        next_token = self._promised.get(user, 0) + 1
        self.waiting.park(user, self._limiter.account_ready_at_ns(user.account, next_token))
        self._other_waits = True  # its turn may be somebody else's now
        self._ignore_if_idle(user)
        return False

    def _has_better_resident(self, user: User[Request], priority: int) -> bool:
        return self.policy == SchedulingPolicy.PRIORITY and (
            any(each < priority for each in user.paused)
            or any(self._owner(each) is user and each.priority < priority for each in self.running)
        )

    def _can_prefill_without_quota(self, request: Request) -> bool:
        """Whether some of the request's prompt can be computed, and fits, before it samples."""
        if request.status == RequestStatus.PREEMPTED or not self._can_split_prefill(request):
            return False
        if self.connector is not None:
            return False  # it may have all of the prompt but the position that samples
        # If it did not fit after all, vLLM would end its scan of the queue here.
        if self._missing_blocks(request) > 0:
            return False
        computed_tokens = request.num_computed_tokens
        if not computed_tokens:
            computed_tokens = self.kv_cache_manager.get_computed_blocks(request)[1]
        return request.num_tokens - computed_tokens > max(1, self.num_prefill_lookahead)

    def _can_split_prefill(self, request: Request) -> bool:
        if not self.scheduler_config.enable_chunked_prefill:
            return False
        # A state is written at the end of a chunk, and these must be where vLLM looks for it.
        if self.need_mamba_block_aligned_split:
            return False
        # Nor may a chunk end in the middle of an image: its positions may see each other.
        last_unsampled = request.num_tokens - max(1, self.num_prefill_lookahead)
        if any(
            each.mm_position.offset + each.mm_position.length > last_unsampled
            for each in request.mm_features
        ):
            return False
        # A chunk that does not sample makes the worker take back a seeded request's random draw,
        # which PyTorch's generators on the CPU cannot do.
        return request.sampling_params.seed is None or not self._on_cpu

    def _missing_blocks(self, request: Request) -> int:
        """Return how many KV blocks a waiting request lacks; what is cached is not deducted."""
        kv_cache = self.kv_cache_manager
        blocks = self._holdings.blocks(request.num_tokens) + kv_cache.watermark_blocks
        if request not in self.waiting.requests:  # of a load it may hold only a part
            for own in kv_cache.get_blocks(request.request_id).blocks:
                blocks -= sum(not block.is_null for block in own)
        return blocks - kv_cache.block_pool.get_num_free_blocks()

    def _note_admissions(self, output: SchedulerOutput) -> None:
        """Note which users have a prompt in progress, and whose requests have come in."""
        for request_id in [
            *(new.req_id for new in output.scheduled_new_reqs),
            *output.scheduled_cached_reqs.resumed_req_ids,
        ]:
            request = self.requests[request_id]
            user = self._owner(request)
            self._end_load(user, request)
            self._fair.use_kept(user.member)
        for user, request in [*self._prefills.items()]:
            if not request.is_prefill_chunk:
                del self._prefills[user]
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            payer = self._payer_of.get(request)
            if request.is_prefill_chunk and payer is not None and payer.account.limited:
                self._prefills[payer] = request

    def _end_prefill(self, user: User[Request], request: Request) -> None:
        if self._prefills.get(user) is request:
            del self._prefills[user]

    # --- who gives way -------------------------------------------------------------------------

    def _allocate_or_evict(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Allocate KV blocks, preempting paused requests one by one until they suffice."""
        while (blocks := self._allocate_slots(request, *args, **kwargs)) is None:
            if self.connector is not None and self.connector.has_pending_block_frees():
                return None  # vLLM waits for those, too
            victims = self._paused_victims(request, kwargs.get("reserved_blocks", 0))
            if not victims:
                return None
            for victim in victims:
                self._evict(victim)
        return blocks

    def _paused_victims(self, request: Request, reserved_blocks: int) -> list[Request]:
        """Return the paused requests that give way to `request`, if they suffice.

        What a load needs has to be free beside what vLLM reserves for prompts in progress.
        """
        if request.status == RequestStatus.RUNNING:
            worst_class = self._priority_class(request)
            if self.policy == SchedulingPolicy.PRIORITY:
                worst_class = max(map(self._priority_class, self.running))
            victim = self._holdings.victim_for_resident(worst_class)
            return [] if victim is None else [victim]
        if not self._has_quota(request) and request is not self._promised_last:
            return []  # it would only be paused in the other's place
        missing = self._missing_blocks(request) + reserved_blocks
        if missing <= 0:
            return []  # there is something else that it waits for
        user = self._owner(request)
        return self._holdings.victims_for_blocks(user, request, missing, self._tokens_left)

    def _has_slot(self, user: User[Request]) -> bool:
        return bool(user.paused) or any(self._owner(each) is user for each in self.running)

    def _may_be_preempted(self, request: Request) -> bool:
        # vLLM 0.32 loses a session that ends its turn while it waits to be computed again.
        ends_turn_soon = request.resumable and request.num_in_flight_tokens > 0
        return not ends_turn_soon and self._request_blocks_can_be_freed(request)

    def _evict(self, victim: Request) -> None:
        self._claimed = None  # there is more room to claim
        self._preempt_request(
            victim,
            self._now_ns / NS_PER_SECOND,
            drop_stale_output=self.requires_kv_delivery,
        )


def is_mid_prefill(request: Request) -> bool:
    """Whether the request has prompt left to compute before the position that samples."""
    return request.num_tokens + request.num_output_placeholders > request.num_computed_tokens + 1
