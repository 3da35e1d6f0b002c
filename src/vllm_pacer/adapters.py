"""Which LoRA adapters are computed in a step in which more could be than fit.

An adapter takes a slot only in the steps in which a request that uses it is computed, so a paused
request keeps none from others. When requests with more adapters than slots could go on, adapters
take turns: those come first that have been left out longest.
"""

from collections.abc import Iterable


class AdapterTurns:
    """Gives the slots of one step after another to adapters.

    Args:
        slots: How many adapters a step can have.

    >>> turns = AdapterTurns(slots=2)
    >>> [sorted(turns.choose([1, 2, 3])) for _ in range(3)]
    [[1, 2], [1, 3], [2, 3]]
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._queue: dict[int, None] = {}  # those that had to be chosen from, in order

    def choose(self, wanted: Iterable[int]) -> set[int]:
        """Return the adapters that get a slot, of those that are wanted, in their order."""
        distinct = dict.fromkeys(wanted)
        if len(distinct) <= self._slots:
            self._queue.clear()
            return set(distinct)
        # Who was not there is behind those that were left out meanwhile.
        queue = [each for each in self._queue if each in distinct]
        queue += [each for each in distinct if each not in self._queue]
        chosen, left_out = queue[: self._slots], queue[self._slots :]
        self._queue = dict.fromkeys(left_out + chosen)
        return set(chosen)
