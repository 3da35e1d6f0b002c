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
6. Between users `FairShare` decides who is admitted and who gives way, and `Positions` who is
   computed when more could be than may. Nothing is decided in the order of vLLM's lists.

Who is paused is in `Pauses`, who waits in `WaitingQueue`, what residents hold in `Holdings`, what
is charged in `Ledger`; who is watched, who came to its quota in the last step and what is in flight
are fields of the scheduler.
"""

from collections.abc import Iterable
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
from vllm_pacer.engine.holdings import Holdings
from vllm_pacer.engine.identity import user_of
from vllm_pacer.engine.snapshot import SnapshotWriter
from vllm_pacer.engine.waiting import WaitingQueue
from vllm_pacer.fairness import FairShare, FirstCome, Member
from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.pauses import Pauses, User
from vllm_pacer.positions import Claim, Positions

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the loggers below its own name

_ALL = 1 << 62

_SOON_NS = NS_PER_SECOND
"""Whoever waits for a token that comes later has no claim to room yet."""

_READY = (RequestStatus.WAITING, RequestStatus.PREEMPTED)

_STEPS_WITHOUT_KEEPING = 8
"""After positions were kept for waiting requests in vain, for want of blocks say, none are kept."""


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
        self._nobody: User[Request] = User(Account("", None), Member("", 1))  # samples nothing
        sharing = FairShare if pacing.fairness else FirstCome
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        weights = {user: float(weight) for user, weight in pacing.weights.items()}
        self._fair = sharing(self.max_num_running_reqs, blocks, weights)
        self._holdings = Holdings(
            self._fair,
            self._pauses,
            self.block_size,
            len(self.kv_cache_config.kv_cache_groups),
            self.max_model_len,
            self._priority_class,
            self._request_blocks_can_be_freed,
        )
        self._positions: dict[int, Positions[User[Request]]] = {}  # by priority class
        self.waiting = WaitingQueue(
            self._register,
            self.policy == SchedulingPolicy.PRIORITY,
            lambda user: self._fair.share(user.member),
            self._may_admit,
            self._holdings.admit,
            self._holdings.give_back,
        )
        self._dispatched: dict[int, tuple[SchedulerOutput, Step]] = {}
        self._steps_in_flight = 0
        self._allocate_slots = self.kv_cache_manager.allocate_slots
        self._active_limit: int = self.max_num_active_reqs

        # Of the current step, or the last one between two.
        self._now_ns = 0
        self._step = Step(0)
        self._watched: dict[User[Request], None] = {}
        self._promised: dict[User[Request], int] = {}
        self._promised_last: Request | None = None
        self._refused: dict[Request, None] = {}
        self._spent: dict[User[Request], None] = {}
        self._prefills: dict[User[Request], Request] = {}  # one in progress, if limited
        self._held_back: list[Request] = []
        self._is_hiding = False
        self._is_guarding = False
        self._slots_held_in_queue = 0
        self._claimed: dict[int, tuple[int, int]] | None = None  # by waiting users, if looked at
        self._left_to_waiting = 0  # positions
        self._newcomers: list[tuple[User[Request], Request]] = []
        self._no_newcomer_before: dict[User[Request], int] = {}  # step
        self._was_held_back = False
        self._held_back_in = -1  # the last step in which prompts were held back
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
        if self.requests.get(request.request_id) is request:
            self._register(request)

    def _register(self, request: Request) -> User[Request]:
        if request.sampling_params is None:
            return self._nobody
        user = self._user_of.get(request)
        if user is None:
            account = self._limiter.account(user_of(request.sampling_params))
            user = self._users.get(account.user)
            if user is None:
                user = User(account, self._fair.enter(account.user))
                self._users[account.user] = user
            account.requests += 1
            self._user_of[request] = user
            self._watch(user)
        return user

    def _owner(self, request: Request) -> User[Request]:
        return self._user_of.get(request, self._nobody)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._repeated = {}
        self._pauses.drop(request)
        user = self._user_of.pop(request, None)
        if user is None:
            self._holdings.give_back(self._nobody, request)
        else:
            self._holdings.forget(user, request, self._now_ns)
            self._end_prefill(user, request)
            account = user.account
            account.requests -= 1
            if account.requests:
                self._wake(user)  # the token it may have been resumed for is free
            else:
                del self._users[account.user]
                self._watched.pop(user, None)
                self._no_newcomer_before.pop(user, None)
                self._fair.leave(user.member)
                if len(self._users) == 1:
                    self.waiting.unpark(next(iter(self._users.values())))  # it may prefill now
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._quiet = False
        self._repeated = {}
        self._leave_pauses(request)
        self._holdings.preempted(request)
        self._end_prefill(self._owner(request), request)
        super()._preempt_request(request, *args, **kwargs)

    def _handle_stopped_request(self, request: Request) -> bool:
        self._repeated = {}
        self._leave_pauses(request)
        return super()._handle_stopped_request(request)

    def _leave_pauses(self, request: Request) -> None:
        if request in self._pauses:
            self._pauses.drop(request)
            self._watch(self._owner(request))

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
        self._now_ns = now_ns = self._clock.now_ns()
        self._step = self._ledger.begin(now_ns)
        self._promised.clear()
        self._promised_last = None
        if len(self._limiter) > len(self._users):
            self._limiter.cleanup_idle_users()
        self._fair.expire(now_ns)
        self.waiting.begin_step(now_ns)
        self._claimed = None
        self._newcomers = []
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
        if pauses or self.waiting.has_turns() or len(running) > self._active_limit:
            running = self._choose_active(running, now_ns)
        if self._prefills:
            running = self._hold_back_prefills(running)
        if len(running) > self._active_limit:
            self._held_back += running[self._active_limit :]
            running = running[: self._active_limit]
        if pauses or self._held_back or self._left_to_waiting:
            self._bound_admission()
            self.kv_cache_manager.allocate_slots = self._allocate_or_evict
            self._is_hiding = True
        if self._watched:
            self._reserve_prefill_lookahead = self._reserve_within_quota
            self._is_guarding = True
        self.running = running

    def _bound_admission(self) -> None:
        """Let vLLM admit no more than there are slots beside those it does not see."""
        hidden = len(self._pauses) + len(self._held_back) + self._slots_held_in_queue
        slots = self.max_num_running_reqs - hidden
        self.max_num_active_reqs = min(self._active_limit, slots)

    def _show_paused(self) -> None:
        self.max_num_active_reqs = self._active_limit
        self._slots_held_in_queue = 0
        if self._is_guarding:
            self._is_guarding = False
            del self._reserve_prefill_lookahead
        self._was_held_back = bool(self._held_back)
        if not self._is_hiding:
            return
        self._is_hiding = False
        del self.kv_cache_manager.allocate_slots
        self.running = [*self.running, *self._held_back, *self._pauses]
        self._held_back.clear()

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
            self._pause(request, self._owner(request))
        spent.clear()
        refused.clear()
        return stay

    def _pause(self, request: Request, user: User[Request]) -> None:
        wake_ns = self._limiter.account_ready_at_ns(user.account)
        self._pauses.pause(request, user, self._priority_class(request), wake_ns)
        self._holdings.update(user, request)
        if sum(map(len, user.paused.values())) == user.account.requests:
            self._watched.pop(user, None)  # nothing of it can take a token

    def _choose_active(self, running: list[Request], now_ns: int) -> list[Request]:
        """Let those go on whose users have quota again, within the limit of active requests."""
        room = self._active_limit - len(running)
        is_sharing = self._pacing.fairness and len(self._users) > 1
        ready = self._pauses.ready(now_ns, most=_ALL if is_sharing else self._active_limit)
        newcomers = self._newcomers = self._let_in() if is_sharing else []
        count = sum(ready.values())
        if count + len(newcomers) <= room:
            self._positions.clear()
            return self._pauses_over(now_ns, room) + running
        if not is_sharing:
            return self._rotate(running, count - room, now_ns)
        return self._divide(running, ready, newcomers, now_ns)

    def _let_in(self) -> list[tuple[User[Request], Request]]:
        """Return the first waiting request of each user for which there is a slot.

        If there is none, a paused request gives way.
        """
        if not self.waiting.has_turns() or self.pause_state != PauseState.UNPAUSED:
            return []
        for request in self.running[: len(self.running) - len(self._pauses)]:
            self._holdings.update(self._owner(request), request)
        free = self.max_num_running_reqs - len(self.running) - self.num_waiting_for_streaming_input
        if free <= 0 and not self._pauses:
            return []
        newcomers = []
        for user, request in self.waiting.heads(self._active_limit):
            if self._no_newcomer_before.get(user, 0) > self._step.number:
                continue
            if free > 0:
                if self._may_admit(user, request):
                    newcomers.append((user, request))
                    free -= 1
            elif request.status in _READY and self._may_begin(user, request):
                victim = self._holdings.victim_for_slot(user, request, self._tokens_left)
                if victim is None:
                    break
                self._evict(victim)
                newcomers.append((user, request))
        return newcomers

    def _pauses_over(self, now_ns: int, room: int) -> list[Request]:
        return self._resumed(self._pauses.resume(now_ns, room))

    def _resumed(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self._watch(self._owner(request))
        return requests

    def _yield(self, request: Request, now_ns: int) -> None:
        """Pause a request that could go on, for want of a position."""
        user = self._owner(request)
        self._pauses.pause(request, user, self._priority_class(request), now_ns)
        self._holdings.update(user, request)

    def _rotate(self, running: list[Request], surplus: int, now_ns: int) -> list[Request]:
        """Let requests take turns: those that have been visible longest make room."""
        # A prefill needs no token yet and would wait for one here.
        may_yield = [request for request in reversed(running) if not _is_mid_prefill(request)]
        for request in may_yield[:surplus]:
            self._yield(request, now_ns)
        running = [request for request in running if request not in self._pauses]
        # In front, or the prefills of others would leave them no room in the step.
        return self._pauses_over(now_ns, self._active_limit - len(running)) + running

    def _divide(
        self,
        running: list[Request],
        ready: dict[User[Request], int],
        newcomers: list[tuple[User[Request], Request]],
        now_ns: int,
    ) -> list[Request]:
        """Divide the positions between users: a better class first, within one by weight."""
        visible: dict[User[Request], dict[int, list[Request]]] = {}
        claims: dict[int, dict[User[Request], int]] = {}

        def claim(user: User[Request], priority: int, count: int) -> None:
            of_class = claims.setdefault(priority, {})
            of_class[user] = of_class.get(user, 0) + count

        for request in running:
            user, priority = self._owner(request), self._priority_class(request)
            visible.setdefault(user, {}).setdefault(priority, []).append(request)
            claim(user, priority, 1)
        for user, count in ready.items():
            for priority in sorted(user.paused):
                paused = min(count, len(user.paused[priority]))
                claim(user, priority, paused)
                count -= paused
        for user, request in newcomers:
            claim(user, self._priority_class(request), self._claim_of_newcomers(user, ready))

        left = self._active_limit
        going_on: dict[User[Request], int] = {}
        ready_left = dict(ready)
        for priority in sorted(claims):
            positions = self._positions.setdefault(priority, Positions())
            given = positions.divide(
                left,
                {
                    user: Claim(count, user.member.weight)
                    for user, count in claims[priority].items()
                },
            )
            left -= sum(given.values())
            for user, count in given.items():
                own = visible.get(user, {}).get(priority, [])
                paused = min(ready_left.get(user, 0), len(user.paused.get(priority, ())))
                if paused:
                    ready_left[user] -= paused
                room = count - len(own) + self._make_room(own, count, paused, now_ns)
                going_on[user] = going_on.get(user, 0) + max(min(room, paused), 0)
        running = [
            request
            for request in running
            if request not in self._pauses and request not in self._held_back
        ]
        room = self._active_limit - len(running)
        resumed: list[Request] = []
        for user in ready:
            count = min(going_on.get(user, 0), room - len(resumed))
            resumed += self._resumed(self._pauses.resume_of(user, now_ns, count))
        if newcomers:
            self._left_to_waiting = room - len(resumed)
        return resumed + running

    def _claim_of_newcomers(self, user: User[Request], ready: dict[User[Request], int]) -> int:
        tokens = self._tokens_left(user) - ready.get(user, 0)
        return max(1, min(self.waiting.length_of(user), tokens))

    def _make_room(self, own: list[Request], positions: int, paused: int, now_ns: int) -> int:
        """Let those of a user's requests pause that have been visible longest.

        Returns:
            How many do.
        """
        surplus = len(own) - positions
        decodes = [request for request in reversed(own) if not _is_mid_prefill(request)]
        if surplus == 0 and paused and positions:
            surplus = 1  # its requests take turns, one in each step
        elif surplus > len(decodes):
            # A prompt in progress needs no token, so it is not paused: it misses this step.
            prefills = [request for request in reversed(own) if _is_mid_prefill(request)]
            self._held_back += prefills[: surplus - len(decodes)]
        del decodes[max(surplus, 0) :]
        for request in decodes:
            self._yield(request, now_ns)
        return len(decodes)

    def _evict(self, victim: Request) -> None:
        self._preempt_request(
            victim,
            self._now_ns / NS_PER_SECOND,
            drop_stale_output=self.requires_kv_delivery,
        )

    def _hold_back_prefills(self, running: list[Request]) -> list[Request]:
        """Leave out a prompt of a user at its quota while another user's prompt is to be computed.

        Every other step at most, so it goes on.
        """
        is_sharing = self._pacing.fairness and len(self._users) > 1
        if not is_sharing or self._step.number <= self._held_back_in + 1:
            return running
        at_quota = {
            request for user, request in self._prefills.items() if not self._has_plenty(user)
        }
        if not at_quota:
            return running
        users = {self._owner(request) for request in at_quota}
        is_waited_for = any(user not in users for user, _ in self.waiting.heads(2)) or any(
            _is_mid_prefill(request) and self._owner(request) not in users for request in running
        )
        if not is_waited_for:
            return running
        held_back = [request for request in running if request in at_quota]
        if len(held_back) == len(running) and not self._newcomers:
            return running  # nothing else could be computed
        if held_back:
            self._held_back_in = self._step.number
            self._held_back += held_back
        return [request for request in running if request not in at_quota]

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
        if not request.num_computed_tokens:
            return True  # the queue offers only what may be admitted
        if self._has_quota(request) or self._can_prefill_without_quota(request):
            return True
        # To let it through and refuse it the token would end vLLM 0.32's scan of the queue.
        self._slots_held_in_queue += 1  # a session keeps its slot between two inputs
        self._bound_admission()
        user = self._owner(request)
        self._pauses.owe(user)
        ready_ns = self._limiter.account_ready_at_ns(user.account)
        if self._skipped_until_ns is None or ready_ns < self._skipped_until_ns:
            self._skipped_until_ns = ready_ns
        return False

    def _may_admit(self, user: User[Request], request: Request) -> bool:
        """Whether the queue may offer a request in this step."""
        return self._has_room(user, request) and self._may_begin(user, request)

    def _has_room(self, user: User[Request], request: Request) -> bool:
        member, holdings = user.member, self._holdings
        blocks = holdings.blocks(request.num_tokens)
        is_entitled = self._fair.is_entitled(member, blocks)
        if not member.slots or (is_entitled and not user.paused):
            return True
        if self._claimed is None:
            self._claimed = self._claims_of_waiting_users()
        slots = claimed = 0
        for priority, of_class in self._claimed.items():
            if priority <= self._priority_class(request):
                slots, claimed = slots + of_class[0], claimed + of_class[1]
        if is_entitled:  # its own claim
            slots, claimed = max(slots - 1, 0), max(claimed - blocks, 0)
        residents = len(self.running) + self.num_waiting_for_streaming_input
        if self._is_hiding:  # else `running` has them all
            residents += len(self._pauses) + len(self._held_back)
        kv_cache = self.kv_cache_manager
        free_blocks = kv_cache.block_pool.get_num_free_blocks() - kv_cache.watermark_blocks
        return self._fair.may_admit(
            member,
            holdings.blocks_soon(request),
            self.max_num_running_reqs - residents - slots,
            free_blocks - holdings.growth - claimed,
        )

    def _claims_of_waiting_users(self) -> dict[int, tuple[int, int]]:
        """Return slots and blocks for the first requests of users within their part, by class."""
        claims: dict[int, tuple[int, int]] = {}
        for user, request in self.waiting.first_of_each_user(self._now_ns + _SOON_NS):
            needed = self._holdings.blocks(request.num_tokens)
            if self._fair.is_entitled(user.member, needed):
                slots, blocks = claims.get(self._priority_class(request), (0, 0))
                claims[self._priority_class(request)] = slots + 1, blocks + needed
        return claims

    def _may_begin(self, user: User[Request], request: Request) -> bool:
        """Whether the user's quota lets a request begin.

        Beside others a user at its quota begins a prompt for every token that it has, and one at a
        time: its prompts keep pace with its quota and do not fill the steps of others.
        """
        if self._has_plenty(user):
            return True
        is_alone = len(self._users) == 1
        if self._tokens_left(user) > 0:
            return is_alone or not self._pacing.fairness or user not in self._prefills
        if is_alone and self._can_prefill_without_quota(request):
            return True
        if not self._has_better_resident(user, self._priority_class(request)):
            self._pauses.owe(user)
        next_token = self._promised.get(user, 0) + 1
        self.waiting.park(user, self._limiter.account_ready_at_ns(user.account, next_token))
        return False

    def _has_better_resident(self, user: User[Request], priority: int) -> bool:
        return self.policy == SchedulingPolicy.PRIORITY and (
            any(each < priority for each in user.paused)
            or any(self._owner(each) is user and each.priority < priority for each in self.running)
        )

    def _has_plenty(self, user: User[Request]) -> bool:
        """Whether the user has a token for each of its requests."""
        return user not in self._watched or self._tokens_left(user) >= user.account.requests

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
        blocks = self._holdings.blocks(request.num_tokens) + kv_cache.watermark_blocks
        return blocks - self._holdings.held(request) - kv_cache.block_pool.get_num_free_blocks()

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
            victims = self._paused_victims(request)
            if not victims:
                return None
            for victim in victims:
                self._evict(victim)
        return blocks

    def _paused_victims(self, request: Request) -> list[Request]:
        """Return the paused requests that give way to `request`, if they suffice."""
        if request.status == RequestStatus.RUNNING:
            worst_class = self._priority_class(request)
            if self.policy == SchedulingPolicy.PRIORITY:
                worst_class = max(map(self._priority_class, self.running))
            victim = self._holdings.victim_for_resident(worst_class)
            return [] if victim is None else [victim]
        if not self._has_quota(request) and request is not self._promised_last:
            return []  # it would only be paused in the other's place
        missing = self._missing_blocks(request)
        user = self._owner(request)
        return self._holdings.victims_for_blocks(user, request, missing, self._tokens_left)

    def _has_quota(self, request: Request) -> bool:
        """Whether a token may be promised to the request in this step."""
        user = self._user_of.get(request)
        return user not in self._watched or self._tokens_left(user) > 0

    def _priority_class(self, request: Request) -> int:
        return request.priority if self.policy == SchedulingPolicy.PRIORITY else 0

    # --- charges ----------------------------------------------------------------------------

    def _book(self, output: SchedulerOutput, now_ns: int) -> None:
        step = self._step
        if self._left_to_waiting:
            self._left_to_waiting = 0
            for user, request in self._newcomers:
                if request.status != RequestStatus.RUNNING:
                    # In vain, for want of blocks say: its position is for others for a while.
                    self._no_newcomer_before[user] = step.number + _STEPS_WITHOUT_KEEPING
        if output.total_num_scheduled_tokens:
            self._charge(output, step)
            self._steps_in_flight += 1
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        if output.scheduled_new_reqs or resumed or self._prefills:
            self._note_admissions(output)
        self._ledger.dispatch(step)
        if step.charges:
            self._dispatched[id(output)] = output, step
        self._busy_since_ns = now_ns if output.total_num_scheduled_tokens else None
        self._quiet = not (
            self._steps_in_flight or self._other_waits or self._was_held_back or self._refused
        )
        if self._snapshot is not None:
            self._write_snapshot(self._snapshot)

    def _note_admissions(self, output: SchedulerOutput) -> None:
        """Note which users have a prompt in progress, and whose requests have come in."""
        for new in output.scheduled_new_reqs:
            self._fair.use_kept(self._owner(self.requests[new.req_id]).member)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._fair.use_kept(self._owner(self.requests[request_id]).member)
        for user, request in [*self._prefills.items()]:
            if not request.is_prefill_chunk:
                del self._prefills[user]
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.is_prefill_chunk:
                user = self._owner(request)
                if user.account.limited:
                    self._prefills[user] = request

    def _end_prefill(self, user: User[Request], request: Request) -> None:
        if self._prefills.get(user) is request:
            del self._prefills[user]

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
        tokens_of: dict[Account, int] = {}
        self._tokens_of = tokens_of
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
        ready_ns = self._limiter.account_ready_at_ns(user.account)
        self._pauses.wake_by(user, ready_ns)
        self.waiting.unpark(user)

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
        wake_ups = (
            self._pauses.next_wake_ns(),
            self.waiting.next_wake_ns(),
            self._skipped_until_ns,
            self._fair.next_expiry_ns() if len(self.waiting) else None,
        )
        return min((each for each in wake_ups if each is not None), default=None)


class PacedAsyncScheduler(PacedScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""


def _is_mid_prefill(request: Request) -> bool:
    """Whether the request has prompt left to compute before the position that samples."""
    return request.num_tokens + request.num_output_placeholders > request.num_computed_tokens + 1
