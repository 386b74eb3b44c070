"""A transformers cache whose keys and values lie on flash.

    model = attach(model)
    model.generate(**inputs, past_key_values=NearflashCache(engine, model.config))

Queries, K and V go to the engine as fp16, whatever the model computes in: of an fp16 model they are the model's own
bits; of a bf16 or fp32 model each is rounded once (to 11 significant bits; beyond 65504: NonFiniteError). That is so
for what follows stored tokens; the first call attends to the model's own tensors.
"""

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from nearflash.abi.errors import CommandError, NearflashError
from nearflash.inference.cache.batch import StoredBatch
from nearflash.inference.cache.decoder import check_all_layers, flash_layers, own_layer
from nearflash.inference.cache.guard import cache_error
from nearflash.inference.cache.layer import FlashLayer
from nearflash.inference.cache.masks import Columns
from nearflash.inference.engines.base import Engine

__all__ = ["NearflashCache"]


class NearflashCache(StoredBatch, Cache):
    """KV of one batch of sequences in an engine; a new one for each new batch, or after `reset`.

    `config`, the model's, says which layers have full attention: those are the engine's; the others keep transformers'
    own cache layers, in memory. Without it all layers are the engine's.

    The first call for a batch (prefill) computes with the tensors of the call and appends them beside the computation,
    `write_behind` layers deep; later calls bring any number of tokens for each sequence and attend in the engine.
    Tokens that the attention mask hides (padding) are not stored, so sequences of unequal length share a batch.
    `crop`, `reorder_cache` (beam search), repeated and selected rows and copies share what is stored: nothing is
    written twice.

    Raises UnsupportedError for torch.compile, and as `columns_of` does; NonFiniteError for q, K or V beyond fp16;
    ShapeError for another batch size; CommandError for a crop beyond what is stored; what the engine raises. After an
    error in the middle of a call `rewind` goes back to before it, or `reset`. Use as a context manager, or `reset` when
    done: both free sequences.
    """

    keeps_kv = True
    """A model must not put another cache in its place (nearflash.inference.cache.guard)."""

    def __init__(self, engine: Engine, config: PreTrainedConfig | None = None, *, write_behind: int = 2) -> None:
        StoredBatch.__init__(self, engine, write_behind)
        self._config = config
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=lambda: FlashLayer(self, len(self.layers), len(self.layers)))
        else:
            Cache.__init__(self, layers=self._empty_layers(config))

    @classmethod
    def of_sequences(
        cls, engine: Engine, config: PreTrainedConfig, sequences: Sequence[int], tokens: Sequence[int]
    ) -> Self:
        """A cache over sequences that the engine holds already, of so many `tokens` each; it frees them in the end.

        Rows count as padded on the left to the longest. Raises UnsupportedError for a model with other layers, too.
        """
        check_all_layers(config)
        cache = cls(engine, config)
        longest = max(tokens, default=0)
        cache.sequences = list(sequences)
        cache._columns = np.arange(longest) >= longest - np.array(tokens, np.int64)[:, None]
        for layer in cache.layers:
            layer.length, layer.is_initialized = longest, True
        return cache

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """No limit; transformers' earlier name of get_max_length."""
        return self.get_max_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit but the flash's: -1."""
        return -1

    def reset(self) -> None:
        """Forget the batch and free its sequences."""
        self.behind.close()
        self.layers[:] = [] if self._config is None else self._empty_layers(self._config)
        self._columns, self._before = np.zeros((0, 0), bool), 0
        self._mask, self._call = None, Columns(None)
        while self.sequences:
            self.engine.free(self.sequences.pop())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of each row: a negative number of them, as transformers' caches take it.

        Raises CommandError for more than there are.
        """
        length = self._columns.shape[1] + tokens_to_remove
        if tokens_to_remove > 0 or length < 0:
            raise CommandError(f"tokens_to_remove must be {-self._columns.shape[1]} to 0, not {tokens_to_remove!r}")
        self._truncate(length)

    def rewind(self) -> None:
        """Be as before the last call, of which an error may have left a part; what was stored before it stays."""
        self._truncate(self._before)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from what row beam_idx[i] was."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._select([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """These rows alone."""
        super().batch_select_indices(indices)
        self._select(np.arange(len(self.sequences))[indices.cpu().numpy()].tolist())

    def check_complete(self, columns: int) -> None:
        """Raise UnsupportedError unless every layer that is on flash has so many columns at least, all alike.

        That is not so where a model puts another cache in this one's place, in memory, and goes on with that.
        """
        held = {self._columns.shape[1], *(layer.length for layer in self.layers if isinstance(layer, FlashLayer))}
        if len(held) > 1 or min(held) < columns:
            raise cache_error(f"it has {' and '.join(map(str, sorted(held)))} of {columns} tokens")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A cache that goes on by itself from here; it shares what is stored."""
        self.behind.wait()
        other = type(self)(self.engine, self._config)
        memo[id(self)] = other
        other.sequences = [self.engine.fork(sequence) for sequence in self.sequences]
        other._columns, other._before = self._columns.copy(), self._before
        other.layers[:] = [
            layer.copy_for(other) if isinstance(layer, FlashLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return other

    def _empty_layers(self, config: PreTrainedConfig) -> list[Any]:
        places = {number: place for place, number in enumerate(flash_layers(config))}
        count = config.get_text_config(decoder=True).num_hidden_layers
        return [
            FlashLayer(self, number, places[number]) if number in places else own_layer(config, number)
            for number in range(count)
        ]

    def _truncate(self, length: int) -> None:
        """Keep the first columns alone."""
        try:
            self.behind.wait()
        except (NearflashError, OSError):  # of a call that is undone
            self.behind.close()
        if not length:
            self.reset()
            return
        for layer in self.layers:
            layer.crop(length - layer.get_seq_length())
        self._columns = self._columns[:, :length]
        self._before = length
        for sequence, tokens in zip(self.sequences, self.lengths, strict=True):
            self.engine.crop(sequence, tokens)
