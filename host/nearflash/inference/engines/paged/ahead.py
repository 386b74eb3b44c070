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
        self._chosen = Future[Bools]()
        self._taken = threads.submit(self._choose_and_read, choose, lacks, read)

    @property
    def chosen(self) -> Bools:
        """The groups that `choose` gave. Raises what it raised."""
        return self._chosen.result()

    def settle(self) -> None:
        """Return when nothing is read any more, whether it failed or not."""
        self._taken.exception()

    def take(self, heads: Ints, groups: Ints, read: ReadGroups) -> F16:
        """Groups in rising order of heads, then numbers; `read`: those that were not read ahead. Raises as it does."""
        own, data = self._taken.result()
        asked = _places(heads, groups)
        at = np.searchsorted(own, asked).clip(max=max(len(own) - 1, 0))
        there = own[at] == asked if len(own) else np.zeros(len(asked), bool)
        if there.all() and len(at) and at[-1] - at[0] == len(at) - 1:
            return data[at[0] : at[-1] + 1]
        if not there.any():
            return read(heads, groups)
        taken = np.empty((len(asked), data.shape[1]), np.float16)
        taken[there] = data[at[there]]
        if not there.all():
            taken[~there] = read(heads[~there], groups[~there])
        return taken

    def _choose_and_read(self, choose: Callable[[], Bools], lacks: Lacks, read: ReadGroups) -> tuple[Ints, F16]:
        try:
            chosen = choose()
        except BaseException as error:
            self._chosen.set_exception(error)
            raise
        self._chosen.set_result(chosen)
        heads, groups = np.nonzero(chosen)
        wanted = lacks(heads, groups)
        return _places(heads[wanted], groups[wanted]), read(heads[wanted], groups[wanted])


def _places(heads: Ints, groups: Ints) -> Ints:
    """One number for a group of a head, in the order of heads, then groups."""
    return heads << 32 | groups
