"""vLLM's schedulers, with a quota per user.

The rules:

1. A step is charged when vLLM has put it together, for the requests that it samples for. A user
   that may run out of quota in the step is watched: `_reserve_prefill_lookahead`, which vLLM asks
   once per candidate just before it allocates KV blocks, promises it no more tokens than it has. A
   request that is refused one is skipped, or its prefill goes on up to the position before the one
   that samples. As long as nobody is watched, vLLM's own method is asked.
2. Paused requests are taken out of `running` while `super().schedule()` runs and put back at its
   end, so between two calls vLLM sees all its residents and within one only those that may run.
   They keep slot, KV and history.
3. `running` is always the visible requests, then the paused ones. The visible ones are in vLLM's
   own order, but for those that have gone on after a pause, which come first.
4. A paused request gives way when KV blocks run out: it is preempted before a visible one.
5. Nothing here waits for a result, so synchronous and asynchronous scheduling differ only in how
   many steps are in flight when a charge is settled.

Who is paused is in `Pauses`, what is charged in `Ledger`; who is watched, who came to its quota in
the last step and what is in flight are fields of the scheduler.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_pacer.charges import Ledger, Step
from vllm_pacer.clock import NS_PER_SECOND, Clock, MonotonicClock
from vllm_pacer.config import PacerConfig
from vllm_pacer.engine.identity import user_of
from vllm_pacer.engine.snapshot import SnapshotWriter
from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.pauses import Pauses, User

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the loggers below its own name

_STEPS_WITHOUT_KEEPING = 8
"""After positions were kept for waiting requests in vain, for want of blocks say, none are kept."""

_POSITIONS_PER_TOKEN = 10
"""Positions that may be computed again for one token when requests take turns in the KV cache."""


class PacedScheduler(Scheduler):
    """vLLM's scheduler with a quota of output tokens per user.

    Args:
        pacing: The quotas.
        clock: What tells the time.
        snapshot: Where the counters for `/metrics` go.
        kwargs: What vLLM's scheduler takes.
    """

    # vLLM's own attributes, changed while it schedules.
    max_num_active_reqs: int
    running: list[Request]

    def __init__(
        self,
        *args: Any,
        pacing: PacerConfig,
        clock: Clock | None = None,
        snapshot: SnapshotWriter | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._pacing = pacing
        self._on_cpu = current_platform.is_cpu()
        self._clock = clock or MonotonicClock()
        self._snapshot = snapshot
        self._limiter = OutputRateLimiter(pacing.quotas().of)
        self._ledger = Ledger(self._limiter, self._on_refund)
        self._pauses: Pauses[Request] = Pauses(self._limiter)
        self._users: dict[str, User[Request]] = {}
        self._user_of: dict[Request, User[Request]] = {}
        self._tokens_when_preempted: dict[Request, int] = {}
        self._dispatched: dict[int, tuple[SchedulerOutput, Step]] = {}
        self._steps_in_flight = 0
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self._active_limit: int = self.max_num_active_reqs

        # Of the current step, or the last one between two.
        self._step = Step(0)
        self._watched: dict[User[Request], None] = {}
        self._promised: dict[User[Request], int] = {}
        self._promised_last: Request | None = None
        self._refused: dict[Request, None] = {}
        self._spent: dict[User[Request], None] = {}
        self._evicted: list[Request] = []
        self._is_hiding = False
        self._is_guarding = False
        self._slots_held_in_queue = 0
        self._kept = 0  # positions left to waiting requests
        self._keep_none_before = 0
        self._busy_since_ns: int | None = None
        self._other_waits = False
        self._skipped_until_ns: int | None = None

        # What a step is charged that schedules the same as the last one.
        self._repeated: dict[str, int] = {}
        self._charges: dict[str, tuple[Account, int]] = {}
        self._tokens_of: dict[Account, int] = {}

        self._quiet = False
        self._warned_of_short_burst = False

    def log_limits(self) -> None:
        """Write the effective limits into the log, in one line."""
        logger.info(
            "vllm-pacer limits output tokens per user: %s; %d resident requests, %d active.",
            self._pacing.describe(),
            self.max_num_running_reqs,
            self._active_limit,
        )

    def _warn_if_burst_is_short(self, step_ns: int) -> None:
        burst_ns = int(self._pacing.burst * NS_PER_SECOND)
        if step_ns > burst_ns and not self._warned_of_short_burst:
            self._warned_of_short_burst = True
            logger.warning(
                "A step took %.0f ms, longer than the burst of %.0f ms: quota that a user earns "
                "beyond the burst while a step runs expires, so users stay below their limits. "
                "Set a longer burst in --user-output-rate-config, or make steps shorter.",
                step_ns / 1e6,
                burst_ns / 1e6,
            )

    # --- who is there -----------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request; its user is known from here until it is freed."""
        self._quiet = False
        super().add_request(request)
        if self.requests.get(request.request_id) is request and request.sampling_params:
            account = self._limiter.account(user_of(request.sampling_params))
            user = self._users.get(account.user)
            if user is None:
                user = self._users[account.user] = User(account)
            account.requests += 1
            self._user_of[request] = user
            self._watch(user)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._repeated = {}
        self._pauses.drop(request)
        self._tokens_when_preempted.pop(request, None)
        user = self._user_of.pop(request, None)
        if user is not None:
            account = user.account
            account.requests -= 1
            if account.requests:
                self._wake(user)  # the token it may have been resumed for is free
            else:
                del self._users[account.user]
                self._watched.pop(user, None)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._quiet = False
        self._repeated = {}
        self._leave_pauses(request)
        self._tokens_when_preempted[request] = request.num_output_tokens
        super()._preempt_request(request, *args, **kwargs)

    def _handle_stopped_request(self, request: Request) -> bool:
        self._repeated = {}
        self._leave_pauses(request)
        return super()._handle_stopped_request(request)

    def _leave_pauses(self, request: Request) -> None:
        if request in self._pauses:
            self._pauses.drop(request)
            self._watch(self._user_of[request])

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish requests from outside; an abort keeps the charges of the steps in flight."""
        self._quiet = False
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            self._ledger.keep([request.request_id for request in finished])
        return finished

    # --- one step ---------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Put together the next step from the requests whose users have quota."""
        now_ns = self._clock.now_ns()
        self._step = self._ledger.begin(now_ns)
        self._promised.clear()
        self._limiter.cleanup_idle_users()
        self._other_waits = False
        self._skipped_until_ns = None
        self._hide_paused(now_ns)
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._show_paused()
        self._book(output, now_ns)
        return output

    def _hide_paused(self, now_ns: int) -> None:
        pauses = self._pauses
        running = self.running
        if pauses:
            running = running[: len(running) - len(pauses)]
        if self._spent:
            running = self._pause_spent(running, now_ns)
        if pauses:
            running = self._resume(running, now_ns)
        if pauses:
            self._bound_admission()
            self.kv_cache_manager.allocate_slots = self._allocate_or_evict
            self._is_hiding = True
        if self._watched:
            self._reserve_prefill_lookahead = self._reserve_within_quota
            self._is_guarding = True
        self.running = running

    def _bound_admission(self) -> None:
        """Let vLLM admit no more than there are slots beside those it does not see."""
        slots = self.max_num_running_reqs - len(self._pauses) - self._slots_held_in_queue
        self.max_num_active_reqs = min(self._active_limit, slots)

    def _show_paused(self) -> None:
        self.max_num_active_reqs = self._active_limit
        self._slots_held_in_queue = 0
        if self._is_guarding:
            self._is_guarding = False
            del self._reserve_prefill_lookahead
        if not self._is_hiding:
            return
        self._is_hiding = False
        del self.kv_cache_manager.allocate_slots
        self.running = [*self.running, *self._pauses]
        # At the head of the queue only now: vLLM pops the head after it admits a request.
        for victim in reversed(self._evicted):
            self.waiting.prepend_request(victim)
        self._evicted.clear()

    def _pause_spent(self, running: list[Request], now_ns: int) -> list[Request]:
        """Pause what needs a token of users that came to their quota: the unserved first."""
        spent, refused = self._spent, self._refused
        if self._busy_since_ns is not None:
            self._warn_if_burst_is_short(now_ns - self._busy_since_ns)
        stay: list[Request] = []
        served: list[Request] = []
        for request in running:
            user = self._user_of.get(request)
            if user not in spent or _is_mid_prefill(request):
                stay.append(request)
            elif request in refused:
                self._pause(request, user)
            else:
                served.append(request)
        for request in served:
            self._pause(request, self._user_of[request])
        spent.clear()
        refused.clear()
        return stay

    def _pause(self, request: Request, user: User[Request]) -> None:
        wake_ns = self._limiter.account_ready_at_ns(user.account)
        self._pauses.pause(request, user, self._priority_class(request), wake_ns)
        if sum(map(len, user.paused.values())) == user.account.requests:
            self._watched.pop(user, None)  # nothing of it can take a token

    def _resume(self, running: list[Request], now_ns: int) -> list[Request]:
        """Let those go on whose users have quota again, within the limit of active requests."""
        pauses = self._pauses
        room = self._active_limit - len(running)
        ready = pauses.ready(now_ns, most=self._active_limit)
        if not ready:
            return self._resumed(now_ns, room) + running  # looks at users that were woken in vain
        may_yield: list[Request] = []
        if ready > room:
            # More could run than may: those that have been visible longest make room, which are
            # the last. A prefill needs no token yet and would wait for one here.
            may_yield = [request for request in reversed(running) if not _is_mid_prefill(request)]
        moving = room + min(max(ready - room, 0), len(may_yield))
        self._kept = self._positions_for_waiting(moving, len(running))
        for request in may_yield[: max(ready + self._kept - room, 0)]:
            user = self._user_of[request]
            pauses.pause(request, user, self._priority_class(request), now_ns)
        if may_yield:
            running = [request for request in running if request not in pauses]
        # In front, or the prefills of others would leave them no room in the step.
        return self._resumed(now_ns, self._active_limit - self._kept - len(running)) + running

    def _resumed(self, now_ns: int, room: int) -> list[Request]:
        resumed = self._pauses.resume(now_ns, room)
        for request in resumed:
            self._watch(self._user_of[request])
        return resumed

    def _positions_for_waiting(self, moving: int, visible: int) -> int:
        """Return how many of the `moving` positions to leave to waiting requests: half of them.

        Residents that are ready would otherwise pass all positions on among themselves, and nobody
        new would be admitted while slots are free.
        """
        slots = self.max_num_running_reqs - len(self._pauses) - visible
        step = self._step.number
        if not self.waiting or step < self._keep_none_before:
            return 0
        return max(0, min(len(self.waiting), slots, (moving + step % 2) // 2))

    def _watch(self, user: User[Request]) -> None:
        if user.account.limited:
            self._watched[user] = None

    def _reserve_within_quota(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Stand in for `_reserve_prefill_lookahead` while somebody may run out of quota."""
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        num_tokens = request.num_tokens
        if num_computed_tokens + num_new_tokens < num_tokens or not num_new_tokens:
            return num_new_tokens
        user = self._user_of.get(request)
        if user not in self._watched:
            return num_new_tokens
        if self._tokens_left(user):
            self._promised[user] = self._promised.get(user, 0) + 1
            self._promised_last = request
            return num_new_tokens
        self._spent[user] = None
        self._refused[request] = None
        if not self._can_split_prefill(request):
            return 0
        last_unsampled = num_tokens - max(1, self.num_prefill_lookahead)
        return max(last_unsampled - num_computed_tokens, 0)

    def _tokens_left(self, user: User[Request]) -> int:
        return self._limiter.available(user.account) - self._promised.get(user, 0)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            # A session's next input comes as a new request, which ends the rest anyway.
            self._other_waits |= request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            return False
        if self._has_quota(request) or self._can_prefill_without_quota(request):
            return True
        # To let it through and refuse it the token would end vLLM 0.32's scan of the queue.
        if request.num_computed_tokens:
            self._slots_held_in_queue += 1  # a session keeps its slot between two inputs
            self._bound_admission()
        user = self._user_of[request]
        self._pauses.owe(user)
        ready_ns = self._limiter.account_ready_at_ns(user.account)
        if self._skipped_until_ns is None or ready_ns < self._skipped_until_ns:
            self._skipped_until_ns = ready_ns
        return False

    def _can_prefill_without_quota(self, request: Request) -> bool:
        """Whether some of the request's prompt can be computed, and fits, before it samples."""
        if request.status == RequestStatus.PREEMPTED or not self._can_split_prefill(request):
            return False
        # If it did not fit after all, vLLM would end its scan of the queue here.
        if self._missing_blocks(request) > 0:
            return False
        computed_tokens = request.num_computed_tokens
        if not computed_tokens:
            computed_tokens = self.kv_cache_manager.get_computed_blocks(request)[1]
        return request.num_tokens - computed_tokens > max(1, self.num_prefill_lookahead)

    def _missing_blocks(self, request: Request) -> int:
        """Return how many KV blocks a waiting request lacks; what is cached is not deducted."""
        kv_cache = self.kv_cache_manager
        blocks = self._blocks(request.num_tokens) + kv_cache.watermark_blocks
        return blocks - kv_cache.block_pool.get_num_free_blocks()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _can_split_prefill(self, request: Request) -> bool:
        # A chunk that does not sample makes the worker take back a seeded request's random draw,
        # which PyTorch's generators on the CPU cannot do.
        is_seeded = request.sampling_params.seed is not None
        return self.scheduler_config.enable_chunked_prefill and not (is_seeded and self._on_cpu)

    # --- KV blocks --------------------------------------------------------------------------

    def _allocate_or_evict(
        self, request: Request, *args: Any, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """Allocate KV blocks, preempting paused requests one by one until they suffice."""
        while (blocks := self._allocate_slots(request, *args, **kwargs)) is None:
            victim = self._paused_victim(request)
            if victim is None:
                return None
            self._preempt_request(
                victim,
                self._clock.now_ns() / NS_PER_SECOND,
                drop_stale_output=self.requires_kv_delivery,
            )
            self.waiting.remove_request(victim)
            self._evicted.append(victim)
        return blocks

    def _paused_victim(self, request: Request) -> Request | None:
        """Return the paused request that gives way to `request`, if one does."""
        if request.status == RequestStatus.RUNNING:
            worst_class = self._priority_class(request)
            if self.policy == SchedulingPolicy.PRIORITY:
                worst_class = max(map(self._priority_class, self.running))
            return next(self._victims(worst_class), None)
        if not self._has_quota(request) and request is not self._promised_last:
            return None  # it would only be paused in the other's place
        victims = self._victims_for_newcomer(request)
        # To evict some that do not suffice would cost them their blocks for nothing.
        freed = sum(self._blocks(victim.num_computed_tokens) for victim in victims)
        return victims[0] if victims and freed >= self._missing_blocks(request) else None

    def _victims(self, worst_class: int) -> Iterator[Request]:
        for victim in self._pauses.victims():
            if self._priority_class(victim) >= worst_class and self._request_blocks_can_be_freed(
                victim
            ):
                yield victim

    def _victims_for_newcomer(self, request: Request) -> list[Request]:
        """Return whom a waiting request may displace: paused ones of users with more residents.

        So users end up with equal numbers and stay there. If the numbers only trade places, a
        request that was displaced itself waits until its victim has earned its recomputation: else
        the two would compute whole contexts for a token each.
        """
        residents = Counter(map(self._user_of.get, chain(self.running, self._pauses)))
        own = residents[self._user_of.get(request)]
        victims = []
        for victim in self._victims(self._priority_class(request)):
            user = self._user_of[victim]
            is_fair = residents[user] > own + 1 or (
                residents[user] > own
                and (not request.num_preemptions or self._has_earned_recomputation(victim))
            )
            if is_fair and not self._tokens_left(user):
                residents[user] -= 1
                victims.append(victim)
        return victims

    def _has_earned_recomputation(self, request: Request) -> bool:
        tokens = request.num_output_tokens - self._tokens_when_preempted.get(request, 0)
        return tokens * _POSITIONS_PER_TOKEN >= request.num_computed_tokens

    def _has_quota(self, request: Request) -> bool:
        """Whether a token may be promised to the request in this step."""
        user = self._user_of.get(request)
        return user not in self._watched or self._tokens_left(user) > 0

    def _priority_class(self, request: Request) -> int:
        return request.priority if self.policy == SchedulingPolicy.PRIORITY else 0

    # --- charges ----------------------------------------------------------------------------

    def _book(self, output: SchedulerOutput, now_ns: int) -> None:
        step = self._step
        if self._kept:
            self._kept = 0
            if not (output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids):
                self._keep_none_before = step.number + _STEPS_WITHOUT_KEEPING
        if output.total_num_scheduled_tokens:
            self._charge(output, step)
            self._steps_in_flight += 1
        self._ledger.dispatch(step)
        if step.charges:
            self._dispatched[id(output)] = output, step
        self._busy_since_ns = now_ns if output.total_num_scheduled_tokens else None
        self._quiet = not (self._steps_in_flight or self._other_waits)
        if self._snapshot is not None:
            self._write_snapshot(self._snapshot)

    def _charge(self, output: SchedulerOutput, step: Step) -> None:
        """Charge a token to the user of each request that the step samples for."""
        if output.num_scheduled_tokens != self._repeated:
            self._find_charges(output.num_scheduled_tokens)
        step.charges = self._charges.copy()
        tokens_of = self._tokens_of
        nearly_spent = self._limiter.take_granted(tokens_of)
        watched = self._watched
        if watched:
            for user in [user for user in watched if user.account in tokens_of]:
                del watched[user]  # it cannot run out in the next step
        for account in nearly_spent:
            user = self._users[account.user]
            watched[user] = None
            if not self._limiter.can_take(account):
                self._spent[user] = None

    def _find_charges(self, scheduled: dict[str, int]) -> None:
        requests, user_of = self.requests, self._user_of
        self._charges = charges = {}
        self._tokens_of = tokens_of = {}
        for request_id in scheduled:
            request = requests[request_id]
            if not request.is_prefill_chunk and (user := user_of.get(request)) is not None:
                charges[request_id] = user.one_token
                account = user.account
                tokens_of[account] = tokens_of.get(account, 0) + 1
        # Most steps schedule what the last one did. If that sampled for all, so does the next.
        self._repeated = scheduled if len(charges) == len(scheduled) else {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's result and settle its charges."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._steps_in_flight -= 1
        _, step = self._dispatched.pop(id(scheduler_output), (None, None))
        if step is not None:
            # No request emits more than it was charged, so equal sums mean equal parts.
            emitted_tokens = 0
            for client_outputs in outputs.values():
                for each in client_outputs.outputs:
                    emitted_tokens += len(each.new_token_ids)
            if emitted_tokens == step.tokens:
                self._ledger.close(step)
            else:
                emitted = {
                    each.request_id: len(each.new_token_ids)
                    for client_outputs in outputs.values()
                    for each in client_outputs.outputs
                }
                self._ledger.settle(step, emitted, self._clock.now_ns())
                if self._snapshot is not None:
                    self._write_snapshot(self._snapshot)
        return outputs

    def _on_refund(self, account: Account) -> None:
        user = self._users.get(account.user)
        if user is not None:
            self._wake(user)

    def _wake(self, user: User[Request]) -> None:
        self._pauses.wake_by(user, self._limiter.account_ready_at_ns(user.account))

    def _write_snapshot(self, snapshot: SnapshotWriter) -> None:
        snapshot.write(
            paused_requests=len(self._pauses),
            charged_tokens=self._ledger.charged_tokens,
            refunded_tokens=self._ledger.refunded_tokens,
        )

    # --- an idle engine ---------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time on the scheduler's clock."""
        return self._clock.now_ns()

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or unpause the scheduler as a whole."""
        self._quiet = False
        super().set_pause_state(pause_state)

    def quiet_until_ns(self) -> int | None:
        """Return the instant before which a step would compute nothing, or `None`.

        `None` means that the engine must step now. Only quota is awaited: a step in flight, a
        grammar being compiled or any other reason to wait gives `None`.
        """
        if not self._quiet:
            return None
        wake_ns = self._pauses.next_wake_ns()
        skipped_ns = self._skipped_until_ns
        if wake_ns is None or skipped_ns is None:
            return wake_ns if skipped_ns is None else skipped_ns
        return min(wake_ns, skipped_ns)


class PacedAsyncScheduler(PacedScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def _is_mid_prefill(request: Request) -> bool:
    """Whether the request has prompt left to compute before the position that samples."""
    return request.num_tokens + request.num_output_placeholders > request.num_computed_tokens + 1
