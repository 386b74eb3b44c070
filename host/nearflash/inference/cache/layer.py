"""One layer of a NearflashCache whose K and V are on flash, and the new tokens of a call on their way there."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from nearflash.abi.errors import NonFiniteError, UnsupportedError
from nearflash.inference.cache.batch import StoredBatch
from nearflash.inference.cache.masks import Columns
from nearflash.inference.engines.cpu.kernels import are_finite

__all__ = ["FlashLayer", "NewTokens", "usage_error"]


class NewTokens:
    """K and V (batch, kv_heads, t, d) of one call, until the attention function gives them to the engine.

    Behind stored tokens it stands where keys and values would; in the first call it is the attribute `near_storage` of
    the real keys.
    """

    def __init__(self, layer: "FlashLayer", key: Tensor, value: Tensor) -> None:
        self.layer, self.key, self.value = layer, key, value

    @property
    def near_storage(self) -> "NewTokens":
        """Itself: found alike on real keys and in their place."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise usage_error(f"another attention function (it asks for {name!r})", "use nearflash.inference.attach(model)")

    def append_in_background(self, kept: NDArray[np.bool_] | None) -> None:
        """Append beside the computation. `kept` (batch, t): tokens that are no padding; None: all."""
        self._begin(kept)
        self.layer.cache.behind.submit(self._append, kept)

    def attend(
        self, query: Tensor, columns: Columns, scaling: float | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Append, then attend with query (batch, heads, t, d); the output, alike. Zero for tokens that are padding."""
        layer, engine, kept = self.layer, self.layer.cache.engine, columns.kept
        layer.waiting = None
        layer.cache.behind.wait()
        self._begin(kept)
        batch, heads, new, dim = query.shape
        stays = new == 1 and kept is None and columns.visible is None and engine.torch_device == query.device
        self._append(kept, {"query": query} if stays else {})
        grouped = (engine.kv_heads, heads // engine.kv_heads)
        options: dict[str, Any] = {}
        if softcap is not None:
            options["softcap"] = softcap
        if stays:
            if sinks is not None:
                options["sinks"] = sinks.detach().float().reshape(grouped)
            half = query.detach().half().reshape(batch, *grouped, dim)
            attended_here = engine.attend_tensor(layer.place, layer.cache.sequences, half, scaling, **options)
            return attended_here.reshape(query.shape).to(query)
        if sinks is not None:
            options["sinks"] = sinks.detach().float().cpu().numpy().reshape(grouped)
        (states,) = _fp16(layer.number, {"query": query})
        if columns.visible is not None:
            q = np.moveaxis(states.reshape(batch, *grouped, new, dim), 3, 2)
            out = np.stack([
                engine.attend_masked(layer.place, sequence, row_q, visible, scaling, **options)
                for sequence, row_q, visible in zip(layer.cache.sequences, q, columns.visible, strict=True)
            ])  # fmt: skip
            return _as_query(out, query)
        if new == 1 and kept is None:
            last_q = states.reshape(batch, *grouped, dim)
            attended = engine.attend(layer.place, layer.cache.sequences, last_q, scaling, **options)
            return torch.from_numpy(attended).reshape(query.shape).to(query)
        q = np.moveaxis(states.reshape(batch, *grouped, new, dim), 3, 2)  # (batch, kv_heads, t, g, d)
        out = np.zeros(q.shape, np.float32)
        real = np.ones((batch, new), bool) if kept is None else kept
        counts = real.sum(axis=1)
        for count in np.unique(counts[counts > 0]).tolist():
            rows = np.flatnonzero(counts == count)
            places = rows[:, None], np.nonzero(real[rows])[1].reshape(len(rows), count)
            real_q = np.moveaxis(q, 2, 1)[places]  # (rows, count, kv_heads, g, d)
            sequences = [layer.cache.sequences[row] for row in rows]
            last_q = real_q[:, 0] if count == 1 else np.ascontiguousarray(np.moveaxis(real_q, 1, 2))
            done = engine.attend(layer.place, sequences, last_q, scaling, **options)
            np.moveaxis(out, 2, 1)[places] = done[:, None] if count == 1 else np.moveaxis(done, 2, 1)
        return _as_query(out, query)

    def _begin(self, kept: NDArray[np.bool_] | None) -> None:
        """Layer and cache know from now on which of the new tokens are stored, (batch, t); None: all."""
        batch, _, new, _ = self.key.shape
        layer = self.layer
        layer.waiting = None
        layer.cache.batch_sequences(batch)
        if layer.place == 0:
            layer.cache.note_columns(np.ones((batch, new), bool) if kept is None else kept)

    def _append(self, columns: NDArray[np.bool_] | None, checked: Mapping[str, Tensor] | None = None) -> None:
        """`checked`, by name: what must be finite, too."""
        layer = self.layer
        k, v, *_ = _fp16(layer.number, {"key": self.key, "value": self.value, **(checked or {})})
        if columns is None:
            for sequence, new_k, new_v in zip(layer.cache.sequences, k, v, strict=True):
                layer.cache.engine.append(sequence, layer.place, new_k, new_v)
            return
        for sequence, new_k, new_v, is_real in zip(layer.cache.sequences, k, v, columns, strict=True):
            if is_real.any():
                whole = slice(None) if is_real.all() else is_real
                layer.cache.engine.append(sequence, layer.place, new_k[:, whole], new_v[:, whole])


class FlashLayer(CacheLayerMixin):
    """Layer `number` of the model, the engine's layer `place`: counts columns (padding, too), and hands them on."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: StoredBatch, number: int, place: int) -> None:
        super().__init__()
        self.cache, self.number, self.place = cache, number, place
        self.length = 0
        self.waiting: NewTokens | None = None
        """What no attention function has taken yet."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Real tensors in a first call of several tokens; else twice what the attention function takes."""
        if torch.compiler.is_compiling():
            _refuse_compilation()
        if self.waiting is not None:
            raise usage_error("another attention function", "use nearflash.inference.attach(model)")
        new, before = key_states.shape[-2], self.length
        self.is_initialized = True
        self.length += new
        self.waiting = NewTokens(self, key_states, value_states)
        if before or new == 1:
            return self.waiting, self.waiting
        key_states.near_storage = self.waiting
        return key_states, value_states

    def copy_for(self, cache: StoredBatch) -> "FlashLayer":
        """The same layer of another cache."""
        other = FlashLayer(cache, self.number, self.place)
        other.length, other.is_initialized = self.length, self.is_initialized
        return other

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that a mask is for."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """No limit but the flash's: -1."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit; transformers' earlier name of get_max_length."""
        return -1

    def offload(self) -> None:
        """Nothing: it is on flash already."""

    def prefetch(self) -> None:
        """Nothing: it stays on flash."""

    def reset(self) -> None:
        """Unsupported for one layer."""
        raise usage_error("a reset of one layer", "reset the cache")

    def crop(self, tokens_to_remove: int) -> None:
        """Count fewer columns; the cache crops its sequences, all layers at once."""
        self.length += tokens_to_remove
        self.waiting = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Nothing: rows are the cache's."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing: rows are the cache's."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing: rows are the cache's."""


def usage_error(what: str, advice: str) -> UnsupportedError:
    """The error of what KV on flash is not for, with what to do in its place."""
    return UnsupportedError(f"KV on flash must be used without {what}: {advice}")


@torch.compiler.disable(reason="KV on flash must be used without torch.compile")
def _refuse_compilation() -> None:
    raise usage_error("torch.compile", "call the model itself")


def _as_query(out: NDArray[np.float32], query: Tensor) -> Tensor:
    """(batch, kv_heads, t, g, d) as (batch, heads, t, d)."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, 2, 3))).reshape(query.shape).to(query)


def _fp16(layer: int, states: Mapping[str, Tensor]) -> list[NDArray[np.float16]]:
    """Tensors by name on the host, from a GPU by one copy. Raises NonFiniteError for what fp16 cannot hold."""
    halves = [state.detach().half() for state in states.values()]
    if halves[0].is_cuda:
        sizes = [half.numel() for half in halves]
        parts = torch.cat([half.reshape(-1) for half in halves]).cpu().split(sizes)
        halves = [part.view(half.shape) for part, half in zip(parts, halves, strict=True)]
    arrays: list[NDArray[np.float16]] = [half.contiguous().numpy() for half in halves]
    for (name, given), array in zip(states.items(), arrays, strict=True):
        if not are_finite(array):
            largest = given.abs().max().item()
            raise NonFiniteError(f"{name} of layer {layer} must be finite in fp16 (at most 65504), not {largest:g}")
    return arrays
