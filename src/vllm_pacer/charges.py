"""Who was charged for which dispatched step.

The rules:

1. A request is charged when a step that samples for it is dispatched, never later: no result is
   waited for, so steps may overlap.
2. A charge is settled downwards only: when the step's output is processed, it goes down to the
   tokens that were emitted for that request in that step.
3. A client's abort keeps the charge of the steps in flight: they do the work.

Hence, per user and after every step: charged = emitted + in flight + aborted in flight.
"""

from collections.abc import Callable, Iterable, Mapping

from vllm_pacer.limiter import Account, OutputRateLimiter


class Charges:
    """Who is charged how many tokens. Steps that charge the same share it: it never changes.

    Args:
        by_request: The account that is charged for each request, and the tokens.
    """

    __slots__ = ("by_account", "by_request", "tokens")

    def __init__(self, by_request: Mapping[str, tuple[Account, int]]) -> None:
        self.by_request = by_request
        self.by_account: dict[Account, int] = {}  # from those without a limit nothing is taken
        self.tokens = 0
        for account, tokens in by_request.values():
            self.tokens += tokens
            if account.limited:
                self.by_account[account] = self.by_account.get(account, 0) + tokens


NO_CHARGES = Charges({})


class Step:
    """One engine step, and what it can still be refunded once it is in flight."""

    __slots__ = ("charges", "number", "tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.charges: Mapping[str, tuple[Account, int]] = NO_CHARGES.by_request
        self.tokens = 0  # the sum of `charges`


class Ledger:
    """The steps that are being put together or are in flight.

    Args:
        limiter: Takes and gives back the tokens.
        on_refund: Called with the account after every refund.
    """

    def __init__(self, limiter: OutputRateLimiter, on_refund: Callable[[Account], None]) -> None:
        self._limiter = limiter
        self._on_refund = on_refund
        self._in_flight: dict[int, Step] = {}
        self.charged_tokens = 0
        self.refunded_tokens = 0

    def begin(self, now_ns: int) -> Step:
        """Start a step at `now_ns`."""
        return Step(self._limiter.begin_step(now_ns))

    def dispatch(self, step: Step, charges: Charges) -> None:
        """Put a step in flight, whose charges have been taken; without any it is over at once."""
        tokens = charges.tokens
        if not tokens:
            self._limiter.end_step(step.number)
            return
        step.charges, step.tokens = charges.by_request, tokens
        self.charged_tokens += tokens
        self._in_flight[step.number] = step

    def keep(self, request_ids: Iterable[str]) -> None:
        """Make the charges of aborted requests final."""
        kept = {*request_ids}
        for step in self._in_flight.values():
            if not kept.isdisjoint(step.charges):
                step.charges = {
                    request_id: charge
                    for request_id, charge in step.charges.items()
                    if request_id not in kept
                }
                step.tokens = sum(tokens for _, tokens in step.charges.values())

    def settle(self, step: Step, emitted: Mapping[str, int], now_ns: int) -> None:
        """Refund what a step was charged and did not emit, and forget the step.

        Args:
            step: A step in flight.
            emitted: The number of tokens emitted for each request; none for those missing.
            now_ns: The time now.
        """
        for request_id, (account, tokens) in step.charges.items():
            unused = tokens - emitted.get(request_id, 0)
            if unused > 0:
                self._limiter.give_back(account, step.number, now_ns, unused)
                self.refunded_tokens += unused
                self._on_refund(account)
        self.close(step)

    def close(self, step: Step) -> None:
        """Forget a step in flight that emitted all that it was charged."""
        if self._in_flight.pop(step.number, None) is not None:
            self._limiter.end_step(step.number)
