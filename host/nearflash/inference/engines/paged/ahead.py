"""KV page groups that are read before the call of attention that wants them: chosen by predicted queries, or as the
call for the token before chose.

layer i - 1: predicted queries of i ─► choice ─► reads ┐ attention, MLP, K and V of layer i
             what i chose last ────────────────► reads ┤
layer i:                          what lacks is read ──┴─► attention
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["AheadGroups", "LastChoices", "ReadAhead", "read_chosen", "read_known"]

Bools = NDArray[np.bool_]
F16 = NDArray[np.float16]
Ints = NDArray[np.int64]
Lacks = Callable[[Ints, Ints], Bools]
"""Which groups, by their heads and numbers (n,), are to be read."""
ReadGroups = Callable[[Ints, Ints], F16]
"""Groups by their heads and numbers (n,), (n, elements)."""
_AGAIN_LEAST = 0.9
"""Share of the groups of a choice that the one before had, from which on the next is read ahead. With fewer, what is
read and not wanted costs processors more than reading ahead saves: where an eighth of 32,768 tokens is chosen, .84 of
it again, 2 % of a step's time for 15 % of its processor seconds."""


@dataclass(frozen=True)
class ReadAhead:
    """Groups that were asked for: group i is row rows[i] of `early` and, behind it, `late`; other rows may be there."""

    rows: Ints
    early: F16
    """Read ahead, (rows, elements)."""
    late: F16
    """Read when they were asked for."""

    def join(self) -> F16:
        """The groups in their order, (n, elements); a view where they were all read ahead one after the other."""
        rows, count = self.rows, len(self.early)
        if len(rows) and not len(self.late) and rows[-1] - rows[0] == len(rows) - 1:
            return self.early[rows[0] : rows[-1] + 1]
        joined, is_early = np.empty((len(rows), self.early.shape[1]), np.float16), rows < count
        joined[is_early], joined[~is_early] = self.early[rows[is_early]], self.late[rows[~is_early] - count]
        return joined


class AheadGroups:
    """Groups of a layer and sequence that are read for a call when it has `tokens`.

    choice: which will be wanted, (heads, groups), and the places of those that are read, in `data` from row `first` on.
    The pages of the store must not change before `data` is there.
    """

    def __init__(self, tokens: int, choice: Future[tuple[Bools, Ints]], data: Future[F16], first: int = 0) -> None:
        self.tokens, self.data = tokens, data
        self._choice, self._first = choice, first

    @property
    def chosen(self) -> Bools:
        """The groups that will be wanted. Raises what choosing them raised."""
        return self._choice.result()[0]

    def take(self, heads: Ints, groups: Ints, read: ReadGroups) -> ReadAhead:
        """Groups in rising order of heads, then numbers; `read`: those that are not read ahead, or of which a read
        failed, maybe for another group's sake. Raises as it does.
        """
        own, asked = self._choice.result()[1], _places(heads, groups)
        rows = np.searchsorted(own, asked).clip(max=max(len(own) - 1, 0))
        there = own[rows] == asked if len(own) else np.zeros(len(asked), bool)
        late = None if there.all() or not there.any() else read(heads[~there], groups[~there])
        if not there.any() or self.data.exception() is not None:
            every = read(heads, groups)
            return ReadAhead(np.arange(len(asked)), every, every[:0])
        early = self.data.result()
        rows += self._first
        if late is None:
            return ReadAhead(rows, early, early[:0])
        rows[~there] = len(early) + np.arange(len(late))
        return ReadAhead(rows, early, late)


def read_chosen(
    tokens: int, threads: ThreadPoolExecutor, choose: Callable[[], Bools], lacks: Lacks, read: ReadGroups
) -> AheadGroups:
    """Begin to read what `choose` gives, (heads, groups), and `lacks`; all three run on one of `threads`."""
    choice = Future[tuple[Bools, Ints]]()

    def choose_and_read() -> F16:
        try:
            chosen = choose()
            heads, groups = np.nonzero(chosen)
            wanted = lacks(heads, groups)
        except BaseException as error:
            choice.set_exception(error)
            raise
        heads, groups = heads[wanted], groups[wanted]
        choice.set_result((chosen, _places(heads, groups)))
        return read(heads, groups)

    return AheadGroups(tokens, choice, threads.submit(choose_and_read))


def read_known(
    threads: ThreadPoolExecutor, parts: Sequence[tuple[int, Bools, Ints, Ints]], read: Callable[[], F16]
) -> list[AheadGroups]:
    """Begin to `read` groups of several sequences together, on one of `threads`.

    parts: of each sequence its tokens, what it will want, and the heads and numbers of the groups that are read.
    """
    data, first, ahead = threads.submit(read), 0, list[AheadGroups]()
    for tokens, chosen, heads, groups in parts:
        choice = Future[tuple[Bools, Ints]]()
        choice.set_result((chosen, _places(heads, groups)))
        ahead.append(AheadGroups(tokens, choice, data, first))
        first += len(heads)
    return ahead


@dataclass
class _Choice:
    """The choice of a layer's last call, of a sequence."""

    groups: Bools
    """(heads, groups)."""
    again: Bools
    """Those that the call before had chosen, too."""


class LastChoices:
    """Which groups of `heads` heads each layer chose last, and which call of attention came after each one.

    Threads may `note` at once, each other heads or sequences.
    """

    def __init__(self, heads: int) -> None:
        self._heads, self._lock = heads, threading.Lock()
        self._kept: dict[tuple[int, int], _Choice] = {}
        """By layer and sequence."""
        self._after: dict[tuple[int, ...], tuple[int, ...]] = {}
        """Layer and sequences of a call, and of the next one."""
        self._call: tuple[int, ...] | None = None

    def begin(self, layer: int, sequences: Sequence[int]) -> None:
        """A call comes after the one that began before it."""
        call = layer, *sequences
        if self._call is not None:
            self._after[self._call] = call
        self._call = call

    def call_after(self, layer: int, sequences: Sequence[int]) -> tuple[int, Sequence[int]] | None:
        """Layer and sequences of the call that came after this one the last time."""
        after = self._after.get((layer, *sequences))
        return None if after is None else (after[0], after[1:])

    def note(self, layer: int, sequence: int, heads: Sequence[int], chosen: Bools) -> None:
        """Some heads of a call chose these groups, (heads, groups)."""
        with self._lock:
            kept = self._kept.get((layer, sequence))
            if kept is None or kept.groups.shape[1] < chosen.shape[1]:
                grown = _Choice(*np.zeros((2, self._heads, chosen.shape[1]), bool))
                if kept is not None:
                    grown.groups[:, : kept.groups.shape[1]] = kept.groups
                    grown.again[:, : kept.again.shape[1]] = kept.again
                kept = self._kept[layer, sequence] = grown
        own, count = list(heads), chosen.shape[1]
        kept.again[own, :count] = kept.groups[own, :count] & chosen
        kept.groups[own, :count] = chosen

    def predict(self, layer: int, sequence: int) -> Bools | None:
        """The groups that both of the last two calls chose, (heads, groups); None where too few."""
        kept = self._kept.get((layer, sequence))
        if kept is None or kept.again.sum() < _AGAIN_LEAST * kept.groups.sum():
            return None
        return kept.again

    def drop(self, sequence: int) -> None:
        """Forget a sequence."""
        for key in [key for key in self._kept if key[1] == sequence]:
            del self._kept[key]
        self._after = {
            call: after for call, after in self._after.items() if sequence not in call[1:] and sequence not in after[1:]
        }
        if self._call is not None and sequence in self._call[1:]:
            self._call = None


def _places(heads: Ints, groups: Ints) -> Ints:
    """One number for a group of a head, in the order of heads, then groups."""
    return heads << 32 | groups
