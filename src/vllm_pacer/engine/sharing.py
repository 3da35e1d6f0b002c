"""vLLM's scheduler, with users that share the positions of a step.

The rules:

1. When more requests could be computed than may be, the positions of the step are divided between
   users, and those that are left out count as paused. A prompt in progress misses the step instead.
2. Waiting requests take part in that; what was left to them in vain goes to others for a while.
3. No step computes more LoRA adapters than have a slot. Those that are left out wait as in rule 1.
4. `Positions` decides who is computed, `AdapterTurns` with which adapters. Nothing is decided in
   the order of vLLM's lists.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_pacer.adapters import AdapterTurns
from vllm_pacer.engine.admission import AdmittingScheduler, is_mid_prefill
from vllm_pacer.pauses import User
from vllm_pacer.positions import Claim, Positions

_Group = tuple[User[Request], int]
"""The requests of one user and priority class."""

_ALL = 1 << 62

_PLACEHOLDER = -1
"""Stands for a draft that only the worker knows."""

_STEPS_WITHOUT_KEEPING = 8
"""After positions were kept for waiting requests in vain, for want of blocks say, none are kept."""


class SharingScheduler(AdmittingScheduler):
    """vLLM's scheduler with users that share slots, KV blocks and positions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._positions: dict[int, Positions[User[Request]]] = {}  # by priority class
        lora = self.lora_config
        self._adapters = None if lora is None else AdapterTurns(lora.max_loras)

        # Of the current step, or the last one between two.
        self._chosen_adapters: set[int] = set()
        self._held_back_in = -1  # the last step in which prompts were held back
        self._left_to_waiting = 0  # positions
        self._newcomers: list[tuple[User[Request], Request]] = []

    def _choose_active(self, running: list[Request], now_ns: int) -> list[Request]:
        """Let those go on whose users have quota again, within the limit of active requests."""
        room = self._active_limit - len(running)
        is_sharing = self._is_sharing()
        ready = self._pauses.ready(now_ns, most=_ALL if is_sharing else self._active_limit)
        count = sum(ready.values())
        newcomers = self._newcomers = self._let_in(running) if is_sharing else []
        if count + len(newcomers) <= room:
            self._positions.clear()
            return self._go_on(now_ns, room) + running if ready else running
        if not is_sharing:
            return self._rotate(running, count - room, now_ns)
        return self._divide(running, ready, newcomers, now_ns)

    def _go_on(self, now_ns: int, room: int) -> list[Request]:
        return self._resumed(self._pauses.resume(now_ns, room))

    def _resumed(self, requests: list[Request]) -> list[Request]:
        for request in requests:
            self._watch(self._owner(request))
            if request.spec_token_ids and request.spec_token_ids[0] == _PLACEHOLDER:
                # The drafts that it stands for were the worker's, for the next step only.
                request.spec_token_ids = []
        return requests

    def _yield(self, request: Request, now_ns: int) -> None:
        """Pause a request that could go on, for want of a position."""
        user = self._owner(request)
        self._pauses.pause(request, user, self._priority_class(request), now_ns)
        self._holdings.update(user, request)

    def _rotate(self, running: list[Request], surplus: int, now_ns: int) -> list[Request]:
        """Let requests take turns: those that have been visible longest make room."""
        # A prefill needs no token yet and would wait for one here.
        may_yield = [request for request in reversed(running) if self._needs_token(request)]
        for request in may_yield[:surplus]:
            self._yield(request, now_ns)
        running = [request for request in running if request not in self._pauses.requests]
        # In front, or the prefills of others would leave them no room in the step.
        return self._go_on(now_ns, self._active_limit - len(running)) + running

    def _divide(
        self,
        running: list[Request],
        ready: dict[User[Request], int],
        newcomers: list[tuple[User[Request], Request]],
        now_ns: int,
    ) -> list[Request]:
        """Divide the positions between users, and let requests pause and go on accordingly."""
        visible: dict[_Group, list[Request]] = {}
        for request in running:
            group = self._owner(request), self._priority_class(request)
            visible.setdefault(group, []).append(request)
        paused = {
            (user, priority): number
            for user, count in ready.items()
            for priority, number in user.first_paused(count).items()
        }
        wanted = Counter({group: len(own) for group, own in visible.items()})
        wanted.update(paused)
        for user, request in newcomers:
            claim = self._claim_of_newcomers(user, ready)
            wanted[user, self._priority_class(request)] += claim

        going_on: Counter[User[Request]] = Counter()
        coming_in: Counter[User[Request]] = Counter()
        for group, positions in self._positions_of(wanted).items():
            user, own, more = group[0], visible.get(group, []), paused.get(group, 0)
            room = positions - len(own) + self._make_room(own, positions, more, now_ns)
            going_on[user] += max(min(room, more), 0)
            coming_in[user] += max(room - more, 0)
        running = [
            request
            for request in running
            if request not in self._pauses.requests and request not in self._held_back
        ]
        room = self._active_limit - len(running)
        resumed: list[Request] = []
        for user in ready:
            count = min(going_on[user], room - len(resumed))
            resumed += self._resumed(self._pauses.resume_of(user, now_ns, count))
        if newcomers:
            self._left_to_waiting = room - len(resumed)
            self._newcomers = [each for each in newcomers if coming_in[each[0]]]
            self._next_time = {user for user, _ in newcomers if not coming_in[user]}
        return resumed + running

    def _positions_of(self, wanted: Mapping[_Group, int]) -> dict[_Group, int]:
        """Give the positions to the better class first, and within one to users by weight."""
        given: dict[_Group, int] = {}
        left = self._active_limit
        for priority in sorted({priority for _, priority in wanted}):
            claims = {
                user: Claim(count, user.member.weight)
                for (user, of_class), count in wanted.items()
                if of_class == priority
            }
            divided = self._positions.setdefault(priority, Positions()).divide(left, claims)
            given.update({(user, priority): count for user, count in divided.items()})
            left -= sum(divided.values())
        return given

    def _claim_of_newcomers(self, user: User[Request], ready: dict[User[Request], int]) -> int:
        tokens = self._tokens_left(user) - ready.get(user, 0)
        return max(1, min(self.waiting.length_of(user), tokens))

    def _make_room(self, own: list[Request], positions: int, paused: int, now_ns: int) -> int:
        """Let those of a user's requests pause that have been visible longest.

        Returns:
            How many do.
        """
        surplus = len(own) - positions
        decodes = [request for request in reversed(own) if self._needs_token(request)]
        if surplus == 0 and paused and positions:
            surplus = 1  # its requests take turns, one in each step
        elif surplus > len(decodes):
            # A prompt in progress needs no token, so it is not paused: it misses this step.
            prefills = [request for request in reversed(own) if not self._needs_token(request)]
            self._held_back += prefills[: surplus - len(decodes)]
        del decodes[max(surplus, 0) :]
        for request in decodes:
            self._yield(request, now_ns)
        return len(decodes)

    def _hold_back_prefills(self, running: list[Request]) -> list[Request]:
        """Leave out a prompt of a user at its quota while another user's prompt is to be computed.

        Every other step at most, so it goes on.
        """
        if not self._is_sharing() or self._step <= self._held_back_in + 1:
            return running
        at_quota = {
            request for user, request in self._prefills.items() if not self._has_plenty(user)
        }
        if not at_quota:
            return running
        users = {self._owner(request) for request in at_quota}
        is_waited_for = any(user not in users for user, _ in self._newcomers) or any(
            is_mid_prefill(request) and self._owner(request) not in users for request in running
        )
        if not is_waited_for:
            return running
        held_back = [request for request in running if request in at_quota]
        if len(held_back) == len(running) and not self._newcomers:
            return running  # nothing else could be computed
        if held_back:
            self._held_back_in = self._step
            self._held_back += held_back
        return [request for request in running if request not in at_quota]

    def _note_vain_newcomers(self) -> None:
        """Give what was left unused, for want of blocks say, to others for a while."""
        self._left_to_waiting = 0
        for user, request in self._newcomers:
            if request.status == RequestStatus.RUNNING or request in self._loads:
                continue
            if self._has_adapter_slot(request):
                self._no_newcomer_before[user] = self._step + _STEPS_WITHOUT_KEEPING

    # --- adapters ------------------------------------------------------------------------------

    def _choose_adapters(
        self, turns: AdapterTurns, running: list[Request], now_ns: int
    ) -> list[Request]:
        """Leave out requests whose LoRA adapter has no slot in this step.

        Newcomers take part: vLLM admits them if their adapter has one.
        """
        newcomers = [request for _, request in self._newcomers]
        loras = [each.lora_request for each in [*running, *newcomers] if each.lora_request]
        self._chosen_adapters = turns.choose(each.lora_int_id for each in loras)
        stay = []
        for request in running:
            if self._has_adapter_slot(request):
                stay.append(request)
            elif self._needs_token(request):
                self._yield(request, now_ns)
            else:
                self._held_back.append(request)
        return stay

    def _has_adapter_slot(self, request: Request) -> bool:
        """Whether the request's adapter has a slot in the current step, or it needs none."""
        lora = request.lora_request
        return lora is None or lora.lora_int_id in self._chosen_adapters
