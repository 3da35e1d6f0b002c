"""What the probe wrote down in the engine's process."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from served.client import Answer

Line = dict[str, Any]
SETTLE_SECONDS = 20


@dataclass(frozen=True)
class Record:
    """A file that grows while the engine runs."""

    path: Path

    def position(self) -> int:
        """Return where the next line will be."""
        return self.path.stat().st_size

    def since(self, position: int = 0) -> "Excerpt":
        """Return all complete lines from a position on."""
        with self.path.open("rb") as file:
            file.seek(position)
            text = file.read()
        complete, _, _ = text.rpartition(b"\n")
        lines = map(json.loads, complete.splitlines())
        return Excerpt([line for line in lines if not _says_nothing(line)])

    def settled_since(self, position: int) -> "Excerpt":
        """Return all lines from a position on, once the engine has nothing left to do."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while not (excerpt := self.since(position)).is_settled:
            assert time.monotonic() < deadline, "The engine has requests that nobody waits for."
            time.sleep(0.05)
        return excerpt

    def engine(self) -> Line:
        """Return the line that describes the engine."""
        with self.path.open("rb") as file:
            line: Line = json.loads(file.readline())
        return line


def _says_nothing(line: Line) -> bool:
    """Whether it is the result of a step without requests, or the abort of one that is gone."""
    return line.get("output_of", 0) is None or line.get("aborted") == []


class Excerpt:
    """A part of the record."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines

    @cached_property
    def steps(self) -> list[Line]:
        """The calls of `schedule()`."""
        return [line for line in self.lines if "step" in line]

    @cached_property
    def steps_ns(self) -> list[int]:
        """When they were called."""
        return [step["at_ns"] for step in self.steps]

    @cached_property
    def outputs(self) -> list[Line]:
        """The results that were processed."""
        return [line for line in self.lines if "output_of" in line]

    @cached_property
    def user_of(self) -> dict[str, str]:
        """The user of each request that arrived."""
        return {line["request"]: line["user"] for line in self.lines if "request" in line}

    @cached_property
    def preempted(self) -> list[Line]:
        """The preemptions."""
        return [line for line in self.lines if "preempted" in line]

    @cached_property
    def aborted(self) -> set[str]:
        """The requests that the front end ended."""
        return {each for line in self.lines for each in line.get("aborted", ())}

    @cached_property
    def is_settled(self) -> bool:
        """Whether every request has ended, and every step's result is processed."""
        finished = {each for output in self.outputs for each in output["finished"]}
        computed = {step["step"] for step in self.steps if step["computed"]}
        processed = {output["output_of"] for output in self.outputs}
        return self.user_of.keys() <= finished | self.aborted and computed <= processed

    @cached_property
    def emitted_by_request(self) -> Counter[str]:
        """Tokens that left the scheduler."""
        count: Counter[str] = Counter()
        for output in self.outputs:
            count.update(output["emitted"])
        return count

    @cached_property
    def aborted_in_flight_by_user(self) -> Counter[str]:
        """Tokens that a step computed for a request that was ended before they could leave."""
        awaited: dict[int, set[str]] = {}
        count: Counter[str] = Counter()
        for line in self.lines:
            if "step" in line:
                awaited[line["step"]] = set(line["sampled"])
            elif "output_of" in line:
                awaited.pop(line["output_of"], None)
            for request in line.get("aborted", ()):
                for requests in awaited.values():
                    if request in requests:
                        requests.remove(request)
                        count[self.user_of[request]] += 1
        return count

    @cached_property
    def emitted_by_user(self) -> Counter[str]:
        """Tokens that left the scheduler."""
        count: Counter[str] = Counter()
        for request, tokens in self.emitted_by_request.items():
            count[self.user_of[request]] += tokens
        return count

    @cached_property
    def charged_by_user(self) -> Counter[str]:
        """Tokens taken from the limiter."""
        count: Counter[str] = Counter()
        for step in self.steps:
            count.update(step["taken"])
        return count

    @cached_property
    def refunded_by_user(self) -> Counter[str]:
        """Tokens given back to the limiter."""
        count: Counter[str] = Counter()
        for line in self.lines:
            if "refunded" in line:
                count[line["refunded"]] += line["tokens"]
        return count

    @cached_property
    def dispatch_ns_by_request(self) -> dict[str, list[int]]:
        """The dispatch instant of every token that was emitted, by request, in order."""
        at_ns = {step["step"]: step["at_ns"] for step in self.steps}
        return self._by_request(lambda output: at_ns[output["output_of"]])

    @cached_property
    def emission_ns_by_request(self) -> dict[str, list[int]]:
        """When every token left the scheduler, by request, in order."""
        return self._by_request(lambda output: output["at_ns"])

    def _by_request(self, instant_of: Callable[[Line], int]) -> dict[str, list[int]]:
        instants: dict[str, list[int]] = defaultdict(list)
        for output in self.outputs:
            for request, tokens in output["emitted"].items():
                if request in self.user_of:  # not one that arrived before this excerpt
                    instants[request] += [instant_of(output)] * tokens
        return instants

    def dispatch_ns_by_user(self) -> dict[str, list[int]]:
        """The dispatch instant of every token that was emitted, by user, in order."""
        return self._by_user(self.dispatch_ns_by_request)

    def emission_ns_by_user(self) -> dict[str, list[int]]:
        """When every token left the scheduler, by user, in order."""
        return self._by_user(self.emission_ns_by_request)

    def _by_user(self, by_request: dict[str, list[int]]) -> dict[str, list[int]]:
        instants: dict[str, list[int]] = defaultdict(list)
        for request, each in by_request.items():
            instants[self.user_of[request]] += each
        return {user: sorted(each) for user, each in instants.items()}

    def longest_step_ns(self) -> int:
        """The longest time from a step's dispatch until its result was processed."""
        at_ns = {step["step"]: step["at_ns"] for step in self.steps}
        return max(
            output["at_ns"] - at_ns[output["output_of"]]
            for output in self.outputs
            if output["output_of"] in at_ns
        )

    def longest_delivery_ns(self, answers: Iterable[Answer]) -> int:
        """The longest time from the dispatch of a token's step to its arrival at the client."""
        # vLLM adds to the name that the client is told.
        dispatched_ns = {
            "-".join(name.split("-")[:2]): each
            for name, each in self.dispatch_ns_by_request.items()
        }
        return max(
            arrived_ns - at_ns
            for answer in answers
            if answer.request_id
            for arrived_ns, at_ns in zip(
                answer.arrivals_ns, dispatched_ns[answer.request_id], strict=False
            )
        )
