"""vLLM's schedulers, with a quota per user.

The rules:

1. A step is charged when vLLM has put it together, for the requests that it samples for. A user
   that may run out of quota in the step is watched: `_reserve_prefill_lookahead`, which vLLM asks
   once per candidate just before it allocates KV blocks, promises it no more tokens than it has. A
   request that is refused one is skipped, or its prefill goes on up to the position before the one
   that samples; one that has quota for fewer drafts is computed with fewer. As long as nobody is
   watched, vLLM's own method is asked.
2. Paused requests are taken out of `running` while `super().schedule()` runs and put back at its
   end, so between two calls vLLM sees all its residents and within one only those that may run.
   They keep slot, KV and history.
3. `running` is always the visible requests, then those that missed the step, then the paused
   ones. The visible ones are in vLLM's own order, but for those that have gone on after a pause,
   which come first.
4. A paused request gives way when KV blocks run out: it is preempted before a visible one.
5. Nothing here waits for a result, so synchronous and asynchronous scheduling differ only in how
   many steps are in flight when a charge is settled.

Who is paused is in `Pauses`, what is charged and in flight in `Ledger`; who is watched and who came
to its quota in the last step are fields of the scheduler. Who gets in and who gives way is decided
in `AdmittingScheduler`, who is computed in `SharingScheduler`.
"""

from collections import deque
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_pacer.charges import NO_CHARGES, Charges, Ledger
from vllm_pacer.clock import NS_PER_SECOND, Clock
from vllm_pacer.config import PacerConfig
from vllm_pacer.engine.sharing import SharingScheduler
from vllm_pacer.engine.snapshot import SnapshotWriter
from vllm_pacer.limiter import Account
from vllm_pacer.pauses import User

_new_tokens = attrgetter("new_token_ids")

_SLOW_NS = 100_000_000
"""A step is slow if it takes longer than this and than the burst: a shorter burst was chosen."""

_SUSTAINED_STEPS = 4
"""When so many steps in a row were slow, the next will be, too."""

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the loggers below its own name


class PacedScheduler(SharingScheduler):
    """vLLM's scheduler with a quota of output tokens per user.

    Args:
        pacing: The quotas.
        clock: What tells the time.
        snapshot: Where the counters for `/metrics` go.
        kwargs: What vLLM's scheduler takes.
    """

    def __init__(
        self,
        *args: Any,
        pacing: PacerConfig,
        clock: Clock | None = None,
        snapshot: SnapshotWriter | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, pacing=pacing, clock=clock, **kwargs)
        self._snapshot = snapshot
        self._ledger = Ledger(self._limiter, self._on_refund)

        # Of the current step, or the last one between two.
        self._refused: dict[Request, None] = {}
        self._spent: dict[User[Request], None] = {}
        self._asked: dict[User[Request], int] = {}  # requests that were offered drafts
        self._is_guarding = False

        # What `running` was made of when it was last put together, to be taken again if unchanged.
        self._shown: list[Request] = []
        self._shown_visible: list[Request] = []
        self._shown_changes = -1

        # For the wait while everybody is paused.
        self._quiet = False
        self._busy_since_ns: int | None = None
        self._was_held_back = False

        # What a step is charged that schedules the same as the last one.
        self._repeated: dict[str, int] = {}
        self._charges = NO_CHARGES

        # How long the last steps took, if all of them were slow.
        self._burst_ns = int(self._pacing.burst * NS_PER_SECOND)
        self._slow_ns = max(self._burst_ns, _SLOW_NS)
        self._slow_steps_ns: deque[int] = deque(maxlen=_SUSTAINED_STEPS)
        self._warned_of_slow_steps = False

    def log_limits(self) -> None:
        """Write the effective limits into the log, in one line."""
        logger.info(
            "vllm-pacer limits output tokens per user: %s; %d resident requests, %d active.",
            self._pacing.describe(),
            self.max_num_running_reqs,
            self._active_limit,
        )

    # --- who is there -----------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request; its user is known from here until it is freed."""
        self._quiet = False
        super().add_request(request)
        if self.requests.get(request.request_id) is request:
            self._register(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._repeated = {}
        self._pauses.drop(request)
        user = self._owner_of.pop(request, None)
        if user is None:
            self._take_back(self._nobody, request)
        else:
            self._end_load(user, request)
            self._payer_of.pop(request, None)
            self._holdings.forget(user, request, self._now_ns)
            self._end_prefill(user, request)
            account = user.account
            account.requests -= 1
            if account.requests:
                self._wake(user)  # the token it may have been resumed for is free
            else:
                del self._users[account.user]
                if not self._users:
                    self._busy_since_ns = None  # an offline engine does not step any more
                self._watched.pop(user, None)
                self._no_newcomer_before.pop(user, None)
                self._fair.leave(user.member)
                if len(self._users) == 1:
                    self._unpark(next(iter(self._users.values())))  # it may prefill now
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._quiet = False
        self._other_waits = True  # also if nothing else happens in this step
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
        if request in self._pauses.requests:
            self._pauses.drop(request)
            self._watch(self._owner(request))

    def _take_back(self, user: User[Request], request: Request) -> None:
        self._other_waits |= self.connector is not None  # which may want to be asked again
        super()._take_back(user, request)

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> set[str]:
        self._repeated = {}  # some that were sampled go back into their prompts
        return super()._handle_invalid_blocks(*args, **kwargs)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        """Finish requests from outside; an abort keeps the charges of the steps in flight.

        But not if vLLM drops all of it when it comes, as after the end of a session's turn.
        """
        self._quiet = False
        finished = super().finish_requests(request_ids, finished_status)
        if finished_status is RequestStatus.FINISHED_ABORTED:
            self._ledger.keep([each.request_id for each in finished if not is_in_vain(each)])
        return finished

    # --- one step ---------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Put together the next step from the requests whose users have quota."""
        self._now_ns = now_ns = self._clock.now_ns()
        if len(self._limiter.users) > len(self._users):
            self._limiter.cleanup_idle_users()
        self._other_waits = self._was_held_back = False
        self._skipped_until_ns = None
        # Most steps have nothing to decide, and need not look any further.
        if not (
            self._watched
            or self._pauses.requests
            or self.waiting.requests
            or self.kv_holding_waiting
            or self._spent
            or self._prefills
            or self._adapters
            or self._shown
            or self._fair.keepers
            or len(self.running) > self._active_limit
        ):
            output = super().schedule(*args, **kwargs)
            if self._repeated and self._repeat(output, now_ns):
                return output
            self._step = self._limiter.begin_step(now_ns)
        else:
            self._step = self._limiter.begin_step(now_ns)
            self._decide(now_ns)
            try:
                output = super().schedule(*args, **kwargs)
            finally:
                self._show_paused()
            if self._left_to_waiting or self._adapters:
                self._note_vain_newcomers()
        self._book(output, now_ns)
        return output

    def _decide(self, now_ns: int) -> None:
        self._fair.expire(now_ns)
        for user in self.waiting.begin_step(now_ns):
            self._watch(user)
        self._hide_paused(now_ns)
        if self._watched:  # also those that go on in this step
            self._reserve_prefill_lookahead = self._reserve_within_quota
            self._is_guarding = True

    def _note_step_time(self, step_ns: int) -> None:
        """Let the burst cover the time of a step while steps are slow.

        What a user earns beyond the burst while a step runs expires, so it would stay below its
        rate. One long step does not count: it may have been the machine.
        """
        slow_steps = self._slow_steps_ns
        if step_ns > self._slow_ns:
            slow_steps.append(step_ns)
        else:
            slow_steps.clear()
        is_sustained = len(slow_steps) == _SUSTAINED_STEPS
        least_ns = min(slow_steps) if is_sustained else 0
        if least_ns < self._limiter.least_burst_ns:
            for user in self._users.values():
                self._watch(user)  # what it had left may be gone
        self._limiter.set_least_burst(least_ns)
        if is_sustained:
            self._warn_of_slow_steps(least_ns)

    def _warn_of_slow_steps(self, step_ns: int) -> None:
        if not self._warned_of_slow_steps:
            self._warned_of_slow_steps = True
            logger.warning(
                "Steps take %.0f ms, longer than the burst of %.0f ms. While they do, users may be "
                "a step's time ahead of their limits, or they could not reach them. To keep the "
                "burst make steps shorter, or set a longer one in --user-output-rate-config.",
                step_ns / 1e6,
                self._burst_ns / 1e6,
            )

    def _hide_paused(self, now_ns: int) -> None:
        pauses = self._pauses.requests
        running = self.running
        self._claimed = None
        self._newcomers, self._next_time = [], set()
        self._sessions = [each for each in self.kv_holding_waiting if self._keeps_slot(each)]
        if pauses:
            running = running[: len(running) - len(pauses)]
        if self._spent:
            running = self._pause_spent(running)
        is_awaited = self.waiting.has_turns() or self.kv_holding_waiting
        if pauses or is_awaited or len(running) > self._active_limit:
            running = self._choose_active(running, now_ns)
        if self._prefills:
            running = self._hold_back_prefills(running)
        if self._adapters:
            running = self._choose_adapters(self._adapters, running, now_ns)
        if len(running) > self._active_limit:
            self._held_back += running[self._active_limit :]
            running = running[: self._active_limit]
        silent = self.num_waiting_for_streaming_input
        if pauses or self._held_back or self._left_to_waiting or silent:
            self._bound_admission()
            self.kv_cache_manager.allocate_slots = self._allocate_or_evict
            self._is_hiding = True
        self.running = running

    def _bound_admission(self) -> None:
        """Let vLLM admit no more than there are slots beside those it does not see.

        It counts sessions that nothing is said to: they have a slot, but they are not active.
        """
        slots = self.max_num_running_reqs - len(self._pauses.requests) - len(self._held_back)
        active = self._active_limit + self.num_waiting_for_streaming_input
        self.max_num_active_reqs = min(active, slots)

    def _show_paused(self) -> None:
        self.max_num_active_reqs = self._active_limit
        if self._is_guarding:
            self._is_guarding = False
            del self._reserve_prefill_lookahead
            self._promised.clear()
            self._promised_last = None
            self._asked.clear()
        self._was_held_back = bool(self._held_back)
        if not self._is_hiding:
            if self._shown:
                self._shown, self._shown_visible = [], []
            return
        self._is_hiding = False
        del self.kv_cache_manager.allocate_slots
        visible, paused, changes = self.running, self._pauses.requests, self._pauses.changes
        is_whole = len(self._shown) == len(visible) + len(paused)  # vLLM may remove in place
        is_same = changes == self._shown_changes and visible == self._shown_visible
        if self._held_back or not (is_whole and is_same):
            self._shown = [*visible, *self._held_back, *paused]
            self._shown_visible, self._shown_changes = visible, changes
            if self._held_back:
                self._held_back.clear()
                self._shown_changes = -1
        # To make a list of a thousand paused requests touches them all, one cache miss each.
        self.running = self._shown

    def _pause_spent(self, running: list[Request]) -> list[Request]:
        """Pause what needs a token of users that came to their quota: the unserved first."""
        spent, refused = self._spent, self._refused
        stay: list[Request] = []
        served: list[Request] = []
        for request in running:
            payer = self._payer_of.get(request)
            if payer not in spent:
                stay.append(request)
            elif request in refused:
                self._pause(request, payer)
            elif self._needs_token(request):
                served.append(request)
            else:
                stay.append(request)
        for request in served:
            self._pause(request, self._owner(request))
        spent.clear()
        refused.clear()
        return stay

    def _pause(self, request: Request, user: User[Request]) -> None:
        wake_ns = self._limiter.account_ready_at_ns(user.account)
        self._pauses.pause(request, user, self._priority_class(request), wake_ns)
        self._holdings.update(user, request)
        self._ignore_if_idle(user)

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
        user = self._payer_of.get(request)
        if user not in self._watched:
            return num_new_tokens
        if left := self._tokens_left(user):
            drafts = num_computed_tokens + num_new_tokens - num_tokens
            drafts -= request.num_output_placeholders
            # What vLLM pads a request with that comes in are placeholders: none is ever accepted.
            if drafts <= 0 or request.status != RequestStatus.RUNNING:
                drafts = unaffordable = 0
            else:
                unaffordable = max(drafts - self._draft_tokens_left(user, left), 0)
            self._promised[user] = self._promised.get(user, 0) + 1 + drafts - unaffordable
            self._promised_last = request
            return num_new_tokens - unaffordable
        self._spent[user] = None
        self._refused[request] = None
        if not self._can_split_prefill(request):
            return 0
        last_unsampled = num_tokens - max(1, self.num_prefill_lookahead)
        return max(last_unsampled - num_computed_tokens, 0)

    def _draft_tokens_left(self, user: User[Request], left: int) -> int:
        """Return how many tokens the user's next request may take for drafts in this step.

        Its other requests in the step come first: a draft may turn out to be for nothing.
        """
        elsewhere = sum(map(len, user.paused.values())) + self.waiting.length_of(user)
        self._asked[user] = asked = self._asked.get(user, 0) + 1
        others = user.account.requests - elsewhere - asked
        return max(left - 1 - max(others, 0), 0)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        if not super()._handle_blocked_waiting_request(request):
            # A session's next input comes as a new request, which ends the rest anyway.
            self._other_waits |= request.status != RequestStatus.WAITING_FOR_STREAMING_REQ
            return False
        if request in self.waiting.requests:
            return True  # the queue offers only what may be admitted
        # The others hold KV blocks, as after a load.
        if self._has_quota(request) or self._can_prefill_without_quota(request):
            return True
        # To let it through and refuse it the token would end vLLM 0.32's scan of the queue.
        self._await_quota(request)
        return False

    # --- charges ----------------------------------------------------------------------------

    def _repeat(self, output: SchedulerOutput, now_ns: int) -> bool:
        """Book a step that schedules the same as the last one, if there is nothing else to it.

        If that one sampled for all its requests, so does this.
        """
        if output.num_scheduled_tokens != self._repeated or output.scheduled_spec_decode_tokens:
            return False
        step = self._limiter.repeat(self._charges.by_account, now_ns)
        if step is None:
            return False
        self._dispatch(step, self._charges, output, now_ns)
        return True

    def _dispatch(self, step: int, charges: Charges, output: SchedulerOutput, now_ns: int) -> None:
        self._ledger.dispatch(step, charges, output)
        busy_since_ns, self._busy_since_ns = self._busy_since_ns, now_ns
        if busy_since_ns is not None and (
            now_ns - busy_since_ns > self._slow_ns or self._slow_steps_ns
        ):
            self._note_step_time(now_ns - busy_since_ns)
        self._quiet = False
        if self._snapshot is not None:
            self._write_snapshot(self._snapshot)

    def _book(self, output: SchedulerOutput, now_ns: int) -> None:
        if output.total_num_scheduled_tokens:
            self._dispatch(self._step, self._charge(output), output, now_ns)
        else:
            self._quiet = not (
                self._ledger.in_flight
                or self._refused
                or self._was_held_back
                or self._other_waits
                or self._awaits_its_stage()
                or self._awaits_connector()
            )
            self._limiter.end_step(self._step)
            if not self._ledger.in_flight:
                self._busy_since_ns = None
                if self._slow_steps_ns:
                    self._note_step_time(0)  # there was time to spare
            if self._snapshot is not None:
                self._write_snapshot(self._snapshot)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        if output.scheduled_new_reqs or resumed or self._prefills:
            self._note_admissions(output)

    def _awaits_its_stage(self) -> bool:
        """Whether a resident may be one for which vLLM lets steps of a pipeline go by."""
        is_pipelined = self.vllm_config.parallel_config.pipeline_parallel_size > 1
        return is_pipelined and len(self.running) > len(self._pauses.requests)

    def _awaits_connector(self) -> bool:
        """Whether a connector has work of which a step will say that it has ended."""
        connector = self.connector
        return connector is not None and (
            self.has_finished_requests()  # which keep their blocks
            or connector.has_pending_push_work()
            or connector.has_pending_block_frees()
            or any(
                each.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                and each.request_id not in self.finished_recving_kv_req_ids
                for each in self.kv_holding_waiting
            )
        )

    def _charge(self, output: SchedulerOutput) -> Charges:
        """Take the tokens that the step may emit from the users of its requests."""
        scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        if scheduled != self._repeated or drafts:
            self._charges = self._find_charges(output)
            is_whole = len(self._charges.by_request) == len(scheduled)
            self._repeated = scheduled if is_whole and not drafts else {}
        charges = self._charges
        nearly_spent = self._limiter.take_granted(charges.by_account, self._most_tokens)
        watched = self._watched
        if watched or nearly_spent:
            users = self._users
            for account in charges.by_account:
                watched.pop(users[account.user], None)  # it cannot run out in the next step
            for account in nearly_spent:
                user = users[account.user]
                watched[user] = None
                if not self._limiter.can_take(account):
                    self._spent[user] = None
        return charges

    def _find_charges(self, output: SchedulerOutput) -> Charges:
        """Charge a token for each request that the step samples for, and one for each draft."""
        requests, payer_of = self.requests, self._payer_of
        by_request: dict[str, tuple[Account, int]] = {}
        others_sample = False
        for request_id in output.num_scheduled_tokens:
            request = requests[request_id]
            if not request.is_prefill_chunk:
                payer = payer_of.get(request)
                if payer is None:
                    others_sample = True
                else:
                    by_request[request_id] = payer.one_token
        if drafts_of := output.scheduled_spec_decode_tokens:
            comes_in = {new.req_id for new in output.scheduled_new_reqs}
            comes_in |= output.scheduled_cached_reqs.resumed_req_ids
            for request_id in drafts_of.keys() & by_request.keys() - comes_in:
                account, token = by_request[request_id]
                by_request[request_id] = account, token + len(drafts_of[request_id])
        return Charges(by_request, others_sample)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process a step's result and settle its charges."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        emitted_tokens = 0
        for client_outputs in outputs.values():
            emitted_tokens += sum(map(len, map(_new_tokens, client_outputs.outputs)))
        if not self._ledger.close(scheduler_output, emitted_tokens):
            emitted = {
                each.request_id: len(each.new_token_ids)
                for client_outputs in outputs.values()
                for each in client_outputs.outputs
            }
            self._ledger.settle(scheduler_output, emitted, self._clock.now_ns())
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
        self._unpark(user)

    def _write_snapshot(self, snapshot: SnapshotWriter) -> None:
        snapshot.write(
            paused_requests=len(self._pauses.requests),
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
            self._fair.next_expiry_ns() if self.waiting.requests else None,
        )
        return min((each for each in wake_ups if each is not None), default=None)


def is_in_vain(request: Request) -> bool:
    """Whether vLLM drops all that is in flight for a request."""
    in_flight = request.num_in_flight_tokens
    return bool(request.drop_stale_output and request.num_stale_output_tokens == in_flight)


class PacedAsyncScheduler(PacedScheduler, AsyncScheduler):
    """The same for asynchronous scheduling."""
