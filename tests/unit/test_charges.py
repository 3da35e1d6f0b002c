"""What is charged, refunded and kept, example by example."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from vllm_pacer.charges import Charges, Ledger
from vllm_pacer.limiter import Account, OutputRateLimiter
from vllm_pacer.quota import Quota

MS = 1_000_000


@dataclass(frozen=True)
class Step:
    """What a step in flight is known by."""

    number: int


class Engine:
    """A ledger and its limiter, at 1,000 tokens a second for everybody."""

    def __init__(self) -> None:
        quota = Quota.per_second(1000)
        self.limiter = OutputRateLimiter(lambda user: quota)
        self.refunds: list[str] = []
        self.ledger = Ledger(self.limiter, self._on_refund)

    def _on_refund(self, account: Account) -> None:
        self.refunds.append(account.user)

    def dispatch(self, now_ns: int, tokens_of: dict[str, int]) -> Step:
        """Dispatch a step that charges requests, whose user is the first letter of their name."""
        step = Step(self.limiter.begin_step(now_ns))
        by_request: dict[str, tuple[Account, int]] = {}
        for name, tokens in tokens_of.items():
            by_request[name] = self.limiter.account(name[0]), tokens
            assert self.limiter.take(*by_request[name])
        self.ledger.dispatch(step.number, Charges(by_request), step)
        return step

    def level_ns(self, user: str, now_ns: int) -> int:
        """Return how far ahead of now a user's account is."""
        account = self.limiter.account(user)
        return max(account.tat // 1000 - now_ns, 0)

    def counters(self) -> tuple[int, int]:
        """Return what the ledger says was charged and refunded."""
        return self.ledger.charged_tokens, self.ledger.refunded_tokens


@pytest.fixture
def engine() -> Engine:
    """A fresh engine."""
    return Engine()


def test_dispatch_counts_what_was_charged(engine: Engine) -> None:
    """A step in flight has charged the sum of its requests' tokens, and refunded nothing."""
    engine.dispatch(0, {"a1": 1, "b1": 4})
    assert len(engine.ledger.in_flight) == 1
    assert engine.counters() == (5, 0)
    assert not engine.refunds


def test_a_step_without_charges_is_over_with_its_result(engine: Engine) -> None:
    """It emits nothing, so there is nothing to settle, and its number is closed."""
    step = engine.dispatch(0, {})
    assert engine.counters() == (0, 0)
    assert engine.ledger.close(step, 0)
    assert not engine.ledger.in_flight
    engine.limiter.account("a")
    engine.limiter.begin_step(10 * MS)
    assert engine.limiter.cleanup_idle_users() == 1


def test_a_step_that_emitted_less_is_not_closed(engine: Engine) -> None:
    """It stays in flight until it is settled."""
    step = engine.dispatch(0, {"a1": 3})
    assert not engine.ledger.close(step, 2)
    assert len(engine.ledger.in_flight) == 1
    engine.ledger.settle(step, {"a1": 2}, 0)
    assert not engine.ledger.in_flight


def test_what_is_not_in_flight_has_nothing_to_settle(engine: Engine) -> None:
    """The result of a step without requests is nobody's."""
    assert engine.ledger.close(object(), 0)


def test_settle_refunds_what_was_not_emitted(engine: Engine) -> None:
    """A charge goes down to the tokens emitted; a request without output emitted none."""
    step = engine.dispatch(0, {"a1": 3, "a2": 1, "b1": 4})
    engine.ledger.settle(step, {"a1": 3, "b1": 1, "c9": 7}, 0)
    assert engine.counters() == (8, 4)
    assert engine.refunds == ["a", "b"]
    assert engine.level_ns("a", 0) == 3 * MS
    assert engine.level_ns("b", 0) == 1 * MS


def test_settle_only_goes_down(engine: Engine) -> None:
    """Whatever is emitted beyond a charge is not charged afterwards."""
    step = engine.dispatch(0, {"a1": 1})
    engine.ledger.settle(step, {"a1": 5}, 0)
    assert engine.counters() == (1, 0)
    assert engine.level_ns("a", 0) == MS


def test_a_late_settlement_refunds_no_more_than_is_left(engine: Engine) -> None:
    """The counter knows every token refunded; the account gets what has not drained."""
    step = engine.dispatch(0, {"a1": 4})
    engine.ledger.settle(step, {}, 3 * MS)
    assert engine.counters() == (4, 4)
    assert engine.level_ns("a", 3 * MS) == 0


def test_an_abort_keeps_the_charges_in_flight(engine: Engine) -> None:
    """Of an aborted request nothing is refunded, in any step that is in flight."""
    steps = [engine.dispatch(number, {"a1": 1, "a2": 1}) for number in range(3)]
    engine.ledger.keep(["a1", "unknown"])
    for step in steps:
        assert not engine.ledger.close(step, 0)
        engine.ledger.settle(step, {}, 3)
    assert engine.counters() == (6, 3)
    assert engine.level_ns("a", 3) == 3 * MS - 3


def test_an_abort_keeps_charges_whatever_iterable_names_the_requests(engine: Engine) -> None:
    """A generator of requests does for all steps in flight, not only for the first."""
    steps = [engine.dispatch(number, {"a1": 1}) for number in range(2)]
    engine.ledger.keep(request for request in ["a1"])
    for step in steps:
        engine.ledger.settle(step, {}, 2)
    assert engine.counters() == (2, 0)


def test_an_abort_does_not_reach_later_steps(engine: Engine) -> None:
    """A new request of an aborted one's name is settled like any other."""
    first = engine.dispatch(0, {"a1": 1})
    engine.ledger.keep(["a1"])
    second = engine.dispatch(1, {"a1": 1})
    engine.ledger.settle(first, {}, 2)
    engine.ledger.settle(second, {}, 2)
    assert engine.counters() == (2, 1)


@pytest.mark.parametrize(
    "end",
    [
        lambda engine, step: engine.ledger.close(step, 1),
        lambda engine, step: engine.ledger.settle(step, {"a1": 1}, 5),
    ],
    ids=["close", "settle"],
)
def test_a_step_that_emitted_its_charges_ends(
    end: Callable[[Engine, Step], None], engine: Engine
) -> None:
    """A step closed after equal sums, or settled, refunds nothing and cannot be refunded later."""
    step = engine.dispatch(0, {"a1": 1})
    end(engine, step)
    assert engine.counters() == (1, 0)
    with pytest.raises(ValueError, match="has ended"):
        engine.limiter.refund("a", step.number, 5)
    engine.limiter.begin_step(10 * MS)
    assert engine.limiter.cleanup_idle_users() == 1


def test_steps_end_in_any_order(engine: Engine) -> None:
    """With three steps in flight, each is settled by itself."""
    steps = [engine.dispatch(0, {"a1": 2}) for _ in range(3)]
    for step, emitted in ((steps[1], 2), (steps[2], 0), (steps[0], 1)):
        engine.ledger.settle(step, {"a1": emitted}, 0)
    assert engine.counters() == (6, 3)
    assert engine.level_ns("a", 0) == 3 * MS


def test_a_step_is_settled_once(engine: Engine) -> None:
    """A second settlement is an error."""
    step = engine.dispatch(0, {"a1": 1})
    engine.ledger.settle(step, {}, 0)
    with pytest.raises(KeyError):
        engine.ledger.settle(step, {}, 0)
    assert engine.counters() == (1, 1)


def test_steps_that_share_their_charges_are_settled_each_for_itself(engine: Engine) -> None:
    """To keep an aborted request's charge in one step leaves the charges that steps share alone."""
    charges = Charges(
        {"a1": (engine.limiter.account("a"), 1), "b1": (engine.limiter.account("b"), 1)}
    )
    first, second = "first", "second"
    engine.ledger.dispatch(engine.limiter.begin_step(0), charges, first)
    engine.ledger.keep(["a1"])
    engine.ledger.dispatch(engine.limiter.begin_step(1), charges, second)
    assert [*charges.by_request] == ["a1", "b1"]
    assert not engine.ledger.close(first, 2)
    assert engine.ledger.close(first, 1)
    assert engine.ledger.close(second, 2)
