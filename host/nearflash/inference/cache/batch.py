"""The rows of a batch in an engine: their sequences, and which of their tokens are stored."""

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import CacheLayerMixin

from nearflash.abi.errors import ShapeError, UnsupportedError
from nearflash.inference.cache.masks import Columns, read_mask
from nearflash.inference.engines.base import Engine
from nearflash.support.write_behind import WriteBehind

__all__ = ["StoredBatch"]


class StoredBatch:
    """State that layers of a cache on flash share: the engine, a sequence for each row, the columns of each call.

    Columns are tokens of the batch, padding included; padding is not stored.
    """

    layers: list[Any]
    """The cache's, those of transformers' own, too."""

    def __init__(self, engine: Engine, write_behind: int) -> None:
        self.engine = engine
        self.behind = WriteBehind(write_behind)
        self.sequences: list[int] = []
        """The engine's number of each row of the batch."""
        self._columns: NDArray[np.bool_] = np.zeros((0, 0), bool)
        """Which tokens of each row are stored, (batch, columns); the others are padding."""
        self._before = 0
        """Columns before the last call."""
        self._mask: torch.Tensor | None = None
        self._call = Columns(None)
        """Of the last call: its mask, and its columns by that."""
        self._states: tuple[int, torch.Tensor] | None = None
        """The layer, of the model's, that attended last, and the hidden states that it attended with."""

    @property
    def takes_predictions(self) -> bool:
        """Whether `predict` gives the engine what it attends by."""
        return self.engine.takes_predictions

    def exchange_states(self, number: int | None, states: torch.Tensor | None) -> torch.Tensor | None:
        """Keep the layer's; return those (batch, t, hidden) that the layer before it attended with in this call, if any
        are kept."""
        kept, self._states = self._states, None if number is None or states is None else (number, states.detach())
        return kept[1] if kept is not None and number is not None and kept[0] == number - 1 else None

    def are_on_flash(self, *numbers: int) -> bool:
        """Whether these layers of the model are the engine's."""
        return all(self._place(number) is not None for number in numbers)

    def predict(self, number: int, queries: torch.Tensor) -> None:
        """Give the engine queries (batch, heads, 1, d) of the model's layer `number`, where it is on flash."""
        place = self._place(number)
        if self.sequences and place is not None:
            batch, _, _, dim = queries.shape
            q = queries.detach().float().cpu().reshape(batch, self.engine.kv_heads, -1, dim).numpy()
            self.engine.predict(place, self.sequences, q)

    def _place(self, number: int) -> int | None:
        """The engine's number of a layer of the model; layers that are made when they are asked for are all its own."""
        return getattr(self.layers[number], "place", None) if number < len(self.layers) else number

    @property
    def lengths(self) -> list[int]:
        """Tokens stored of each row, padding not counted."""
        return [int(count) for count in self._columns.sum(axis=1)]

    def batch_sequences(self, batch: int) -> list[int]:
        """The sequences of a batch of this size, made where there are none. Raises ShapeError for another size."""
        if not self.sequences:
            self.sequences = [self.engine.add() for _ in range(batch)]
            self._columns = np.zeros((batch, 0), bool)
        if batch != len(self.sequences):
            raise ShapeError(f"batch must have {len(self.sequences)} sequences as before, not {batch}; or reset first")
        return self.sequences

    def columns_of(self, mask: torch.Tensor | None, place: int, batch: int, new: int) -> Columns:
        """The columns of a call of `new` tokens, by the mask at the engine's layer `place`. Call it before they are
        stored. Raises UnsupportedError as `read_mask` does; the call is undone then.
        """
        if place and mask is self._mask:
            return self._call
        stored = self._columns[:, : self._before] if place else self._columns
        try:
            if self.sequences:
                self.batch_sequences(batch)
            if not place:
                self._check_layers(new)
            stored = stored if len(stored) else np.zeros((batch, 0), bool)
            columns = read_mask(mask, stored, new, self.engine.takes_masks)
            kept = np.ones((batch, new), bool) if columns.kept is None else columns.kept
            if place and not np.array_equal(self._columns[:, self._before :], kept):
                raise UnsupportedError("attention_mask with KV on flash must hide the same new tokens in all layers")
        except (UnsupportedError, ShapeError):
            self._undo(new)
            raise
        self._mask, self._call = mask, columns
        return columns

    def note_columns(self, columns: NDArray[np.bool_]) -> None:
        """Begin a call; columns: which of the new tokens are stored, (batch, t)."""
        self._before = self._columns.shape[1]
        self._columns = np.concatenate([self._columns, columns], axis=1)

    def _check_layers(self, new: int) -> None:
        """Raise the error of an earlier call that left layers at different columns; UnsupportedError where it had none.

        Layers that are never asked, as where layers share K and V, have none.
        """
        before = self._columns.shape[1]
        held = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if held - {0, before, before + new}:
            self.behind.wait()  # its own error, where it ended by one behind the computation
            raise UnsupportedError("cache must be rewound or reset: an earlier call ended between its layers")

    def _undo(self, new: int) -> None:
        """Forget a call's `new` tokens of which none is stored: its first layers count them already."""
        length = self._columns.shape[1]
        for layer in self.layers:
            if layer.get_seq_length() == length + new:
                with suppress(RuntimeError):  # of a window that does not keep what it has left: the next call finds it
                    layer.crop(-new)

    def _select(self, rows: list[int]) -> None:
        """The batch is now these rows of it: the first use of each keeps its sequence, others are forks."""
        self.behind.wait()
        left, chosen = list(self.sequences), []
        for row in rows:
            sequence = self.sequences[row]
            if sequence in left:
                left.remove(sequence)
                chosen.append(sequence)
            else:
                chosen.append(self.engine.fork(sequence))
        for sequence in left:
            self.engine.free(sequence)
        self.sequences, self._columns = chosen, self._columns[rows]
