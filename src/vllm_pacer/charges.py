"""Who was charged for which dispatched step.

The rules:

1. A request is charged when a step that samples for it is dispatched, never later: no result is
   waited for, so steps may overlap.
2. A charge is settled downwards only: when the step's output is processed, it goes down to the
   tokens that were emitted for that request in that step.
3. A client's abort keeps the charge of the steps in flight: they do the work. What would be dropped
   anyway, as after the end of a session's turn, is settled like any other.

Hence, per user and after every step: charged = emitted + in flight + aborted in flight.
"""

from collections.abc import Callable, Iterable, Mapping, Set

from vllm_pacer.limiter import Account, OutputRateLimiter


class Charges:
    """Who is charged how many tokens. Steps that charge the same share it: it never changes.

    Args:
        by_request: The account that is charged for each request, and the tokens.
        others_emit: Whether the step may emit tokens that nobody is charged for.
    """

    __slots__ = ("by_account", "by_request", "others_emit", "tokens")

    def __init__(
        self, by_request: Mapping[str, tuple[Account, int]], others_emit: bool = False
    ) -> None:
        self.by_request = by_request
        self.others_emit = others_emit
        self.by_account: dict[Account, int] = {}  # from those without a limit nothing is taken
        self.tokens = 0
        for account, tokens in by_request.values():
            self.tokens += tokens
            if account.limited:
                self.by_account[account] = self.by_account.get(account, 0) + tokens

    def without(self, request_ids: Set[str]) -> "Charges":
        """Return the charges of the other requests."""
        if request_ids.isdisjoint(self.by_request):
            return self
        rest = {k: v for k, v in self.by_request.items() if k not in request_ids}
        return Charges(rest, self.others_emit)


NO_CHARGES = Charges({})


class Ledger:
    """The steps in flight, and what they can still be refunded.

    A step in flight is known by whatever object stands for it outside, which is kept alive.

    Args:
        limiter: Takes and gives back the tokens.
        on_refund: Called with the account after every refund.
    """

    def __init__(self, limiter: OutputRateLimiter, on_refund: Callable[[Account], None]) -> None:
        self._limiter = limiter
        self._on_refund = on_refund
        self._in_flight: dict[int, tuple[object, int, Charges]] = {}
        self.in_flight = self._in_flight.keys()
        """The identities of the steps in flight, as they are at any time."""
        self.charged_tokens = 0
        self.refunded_tokens = 0

    def dispatch(self, step: int, charges: Charges, flight: object) -> None:
        """Put a step in flight, whose charges have been taken from the limiter.

        Args:
            step: The limiter's number of the step.
            charges: What it was charged.
            flight: What the step is known by from now on.
        """
        self._in_flight[id(flight)] = flight, step, charges
        self.charged_tokens += charges.tokens

    def keep(self, request_ids: Iterable[str]) -> None:
        """Make the charges of aborted requests final."""
        kept = {*request_ids}
        for key, (flight, step, charges) in self._in_flight.items():
            self._in_flight[key] = flight, step, charges.without(kept)

    def close(self, flight: object, emitted_tokens: int) -> bool:
        """Forget a step if it emitted all that it was charged.

        If nobody else emits, no request emits more than it was charged: equal sums mean equal
        parts.

        Returns:
            Whether it did; also true of what is not in flight. Otherwise it is to be settled.
        """
        key = id(flight)
        if key in self._in_flight:
            _, step, charges = self._in_flight[key]
            if emitted_tokens != charges.tokens or charges.others_emit:
                return False
            del self._in_flight[key]
            self._limiter.end_step(step)
        return True

    def settle(self, flight: object, emitted: Mapping[str, int], now_ns: int) -> None:
        """Refund what a step was charged and did not emit, and forget the step.

        Args:
            flight: What a step in flight is known by.
            emitted: The number of tokens emitted for each request; none for those missing.
            now_ns: The time now.

        Raises:
            KeyError: The step is not in flight.
        """
        _, step, charges = self._in_flight.pop(id(flight))
        for request_id, (account, tokens) in charges.by_request.items():
            unused = tokens - emitted.get(request_id, 0)
            if unused > 0:
                self._limiter.give_back(account, step, now_ns, unused)
                self.refunded_tokens += unused
                self._on_refund(account)
        self._limiter.end_step(step)
