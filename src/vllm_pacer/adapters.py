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
        # Those that had to be chosen from, in order, and whether each was wanted the last time.
        self._queue: dict[int, bool] = {}

    def choose(self, wanted: Iterable[int]) -> set[int]:
        """Return the adapters that get a slot, of those that are wanted, in their order.

        Whoever is not wanted for one step keeps its place; after two it comes behind the others.
        """
        distinct = dict.fromkeys(wanted)
        if len(distinct) <= self._slots and not self._queue:
            return set(distinct)
        queue = [each for each, was_wanted in self._queue.items() if was_wanted or each in distinct]
        queue += [each for each in distinct if each not in self._queue]
        chosen = [each for each in queue if each in distinct][: self._slots]
        left_out = [each for each in queue if each not in chosen]
        self._queue = {each: each in distinct for each in left_out + chosen} if left_out else {}
        return set(chosen)
