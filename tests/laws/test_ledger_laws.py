"""Charged = emitted + in flight + aborted in flight, per user and after every event."""

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from oracle import excess_tokens, level_ns

from vllm_pacer.charges import Charges, Ledger
from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.quota import Quota

MS = 1_000_000
BURST_NS = 200 * MS
RATES = {"a": Fraction(10), "b": Fraction(100, 3), "c": Fraction(1000)}
QUOTAS = {user: Quota(rate, BURST_NS) for user, rate in RATES.items()}
MOST_IN_FLIGHT = 3

users = st.sampled_from("abcu")  # u has no limit


@dataclass
class Charge:
    """What a request was charged in a step and has not been given back."""

    request: str
    instant_ns: int
    tokens: int

    @property
    def user(self) -> str:
        """The first letter of the request's name."""
        return self.request[0]


@dataclass
class InFlight:
    """A step in flight and its charges by request."""

    charges: dict[str, Charge] = field(default_factory=dict)


class LedgerMachine(RuleBasedStateMachine):
    """An engine that dispatches steps, gets results in any order, and has clients that cancel."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = OutputRateLimiter(QUOTAS.get)
        self.refund_calls: Counter[str] = Counter()
        self.ledger = Ledger(self.limiter, self._on_refund)
        self.now_ns = 0
        self.in_flight: list[InFlight] = []
        self.survivors: list[Charge] = []
        self.emitted: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.charged_tokens = 0
        self.refunded_tokens = 0
        self.expected_refund_calls: Counter[str] = Counter()

    def _on_refund(self, account: Account) -> None:
        self.refund_calls[account.user] += 1

    def _refund(self, charge: Charge, tokens: int) -> None:
        if tokens:
            charge.tokens -= tokens
            self.refunded_tokens += tokens
            self.expected_refund_calls[charge.user] += 1

    @rule(duration_ns=st.sampled_from([0, 1, MS, 30 * MS, 100 * MS, 10_000 * MS]))
    def time_passes(self, duration_ns: int) -> None:
        """The clock goes on."""
        self.now_ns += duration_ns

    @precondition(lambda self: len(self.in_flight) < MOST_IN_FLIGHT)
    @rule(
        asks=st.dictionaries(
            st.tuples(users, st.integers(0, 3)).map(lambda name: f"{name[0]}{name[1]}"),
            st.integers(1, 4),
            max_size=6,
        )
    )
    def dispatch(self, asks: dict[str, int]) -> None:
        """A step charges the requests whose users have the quota."""
        step = self.limiter.begin_step(self.now_ns)
        self.limiter.cleanup_idle_users()
        flight = InFlight()
        charges: dict[str, tuple[Account, int]] = {}
        for request, tokens in asks.items():
            account = self.limiter.account(request[0])
            if self.limiter.take(account, tokens):
                charges[request] = account, tokens
                flight.charges[request] = Charge(request, self.now_ns, tokens)
                self.charged_tokens += tokens
        self.ledger.dispatch(step, Charges(charges), flight)
        self.survivors += flight.charges.values()
        self.in_flight.append(flight)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """A step's result comes: each request has emitted what it was charged, or less."""
        flight = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        emitted = {
            request: data.draw(st.integers(0, charge.tokens))
            for request, charge in flight.charges.items()
        }
        charged_tokens = sum(charge.tokens for charge in flight.charges.values())
        is_whole = sum(emitted.values()) == charged_tokens
        assert self.ledger.close(flight, sum(emitted.values())) == is_whole
        if not is_whole:
            self.ledger.settle(flight, emitted, self.now_ns)
        for request, charge in flight.charges.items():
            self._refund(charge, charge.tokens - emitted[request])
            self.emitted[charge.user] += emitted[request]

    @rule(
        requests=st.sets(
            st.tuples(users, st.integers(0, 3)).map(lambda name: f"{name[0]}{name[1]}"), max_size=3
        )
    )
    def abort(self, requests: set[str]) -> None:
        """Clients go away: what their requests have in flight stays charged."""
        self.ledger.keep(sorted(requests))
        for flight in self.in_flight:
            for request in requests & flight.charges.keys():
                charge = flight.charges.pop(request)
                self.aborted[charge.user] += charge.tokens

    @invariant()
    def the_law(self) -> None:
        """Charged = emitted + in flight + aborted in flight, for every user."""
        held = Counter(dict.fromkeys("abcu", 0))
        for charge in self.survivors:
            held[charge.user] += charge.tokens
        in_flight: Counter[str] = Counter()
        for flight in self.in_flight:
            for charge in flight.charges.values():
                in_flight[charge.user] += charge.tokens
        assert held == self.emitted + in_flight + self.aborted
        assert self.ledger.charged_tokens == self.charged_tokens
        assert self.ledger.refunded_tokens == self.refunded_tokens
        assert self.charged_tokens - self.refunded_tokens == held.total()
        assert self.refund_calls == self.expected_refund_calls

    @invariant()
    def every_account_stands_at_what_it_holds(self) -> None:
        """Each user's limiter stands as if only the charges it holds had been made."""
        for user, rate in RATES.items():
            charges = [
                (each.instant_ns, each.tokens) for each in self.survivors if each.user == user
            ]
            account = self.limiter.account(user)
            level = max(Fraction(account.tat, rate.numerator) - self.now_ns, Fraction(0))
            assert level == level_ns(charges, rate, self.now_ns)
            assert excess_tokens(charges, rate, BURST_NS, self.now_ns) <= 0

    def teardown(self) -> None:
        """When all results are in and all has drained, nothing is remembered."""
        for flight in self.in_flight:
            self.ledger.settle(flight, {}, self.now_ns)
        assert not self.ledger.in_flight
        self.limiter.begin_step(self.now_ns + 10**12)
        for _ in range(2):
            self.limiter.cleanup_idle_users(checks=100)
        assert len(self.limiter) == 0


TestLedger = LedgerMachine.TestCase
