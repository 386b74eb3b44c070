"""KV page groups that are read before the call of attention that wants them: chosen by predicted queries.

layer i - 1: predicted queries of i ─► choice ─► reads ┐ attention, MLP, K and V of layer i
layer i:                          what lacks is read ──┴─► attention
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

__all__ = ["AheadGroups"]

Bools = NDArray[np.bool_]
F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
Lacks = Callable[[Ints, Ints], Bools]
"""Which groups, by their heads and numbers (n,), are to be read."""
ReadGroups = Callable[[Ints, Ints], F16]
"""Groups by their heads and numbers (n,), (n, elements)."""


class AheadGroups:
    """Groups of a layer and sequence, for a call when it has `tokens`.

    `choose` gives those that will be wanted, (heads, groups); what `lacks` of them is read. All three run on one of
    `threads`. The store must not change before `settle` returns.
    """

    def __init__(
        self, tokens: int, threads: ThreadPoolExecutor, choose: Callable[[], Bools], lacks: Lacks, read: ReadGroups
    ) -> None:
        self.tokens = tokens
        self._choice = Future[tuple[Bools, Ints]]()
        """And the places of what is read of it."""
        self._data = threads.submit(self._choose_and_read, choose, lacks, read)

    @property
    def chosen(self) -> Bools:
        """The groups that `choose` gave. Raises what it raised."""
        return self._choice.result()[0]

    def settle(self) -> None:
        """Return when nothing is read any more, whether it failed or not."""
        self._data.exception()

    def take(self, heads: Ints, groups: Ints, read: ReadGroups) -> F16:
        """Groups in rising order of heads, then numbers; `read`: those that are not read ahead. Raises as it does."""
        own, asked = self._choice.result()[1], _places(heads, groups)
        at = np.searchsorted(own, asked).clip(max=max(len(own) - 1, 0))
        there = own[at] == asked if len(own) else np.zeros(len(asked), bool)
        if not there.any():
            return read(heads, groups)
        late = None if there.all() else read(heads[~there], groups[~there])
        data = self._data.result()
        if late is None and at[-1] - at[0] == len(at) - 1:
            return data[at[0] : at[-1] + 1]
        taken = np.empty((len(asked), data.shape[1]), np.float16)
        taken[there] = data[at[there]]
        if late is not None:
            taken[~there] = late
        return taken

    def _choose_and_read(self, choose: Callable[[], Bools], lacks: Lacks, read: ReadGroups) -> F16:
        try:
            chosen = choose()
            heads, groups = np.nonzero(chosen)
            wanted = lacks(heads, groups)
        except BaseException as error:
            self._choice.set_exception(error)
            raise
        heads, groups = heads[wanted], groups[wanted]
        self._choice.set_result((chosen, _places(heads, groups)))
        return read(heads, groups)


def _places(heads: Ints, groups: Ints) -> Ints:
    """One number for a group of a head, in the order of heads, then groups."""
    return heads << 32 | groups
