"""A transformers cache whose keys and values lie on flash.

    model = attach(model)
    model.generate(**inputs, past_key_values=NearflashCache(engine))

Queries, K and V go to the engine as fp16, whatever the model computes in: of an fp16 model they are the model's own
bits; of a bf16 or fp32 model each is rounded once (to 11 significant bits; beyond 65504: NonFiniteError). That is so in
decode only: the first call attends to the model's own tensors.
"""

from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin

from nearflash.abi.errors import NonFiniteError, ShapeError, UnsupportedError
from nearflash.inference.engines.base import Engine
from nearflash.inference.engines.write_behind import WriteBehind

__all__ = ["NearflashCache", "NewTokens"]


class NearflashCache(Cache):
    """KV of one batch of sequences in an engine; a new one for each new batch, or after `reset`.

    The first call for a batch (prefill) computes with the tensors of the call and appends them behind the computation,
    `write_behind` layers deep; later calls bring one token for each sequence and attend in the engine. Tokens that the
    attention mask hides (padding) are not stored, so sequences of unequal length share a batch. More new tokens for
    what is stored go in with `generate(..., prefill_chunk_size=1)`.

    Raises UnsupportedError for what stored KV cannot do: crop, reordering (beam search), several tokens behind stored
    ones, torch.compile; NonFiniteError for q, K or V beyond fp16; ShapeError for another batch size; what the engine
    raises. After an error of the engine only `reset` helps. Use as a context manager, or `reset` when done: both free
    the sequences.
    """

    def __init__(self, engine: Engine, *, write_behind: int = 2) -> None:
        super().__init__(layer_class_to_replicate=lambda: _Layer(self, len(self.layers)))
        self.engine = engine
        self.behind = WriteBehind(write_behind)
        self.sequences: list[int] = []
        """The engine's number of each row of the batch."""

    def get_max_cache_shape(self, layer_idx: int | None = None) -> int:
        """No limit; transformers' earlier name of get_max_length."""
        return self.get_max_length(layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit but the flash's: -1."""
        return -1

    def reset(self) -> None:
        """Forget the batch and free its sequences."""
        self.behind.close()
        self.layers.clear()
        while self.sequences:
            self.engine.free(self.sequences.pop())

    def batch_sequences(self, batch: int) -> list[int]:
        """The sequences of a batch of this size, made where there are none. Raises ShapeError for another size."""
        if not self.sequences:
            self.sequences = [self.engine.add() for _ in range(batch)]
        if batch != len(self.sequences):
            raise ShapeError(f"batch must have {len(self.sequences)} sequences as before, not {batch}; or reset first")
        return self.sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()

    def __deepcopy__(self, _: object) -> Self:
        raise _unsupported("a copy", "make another NearflashCache")


class NewTokens:
    """K and V (batch, kv_heads, t, d) of one call, until the attention function gives them to the engine.

    In decode it stands where keys and values would; in prefill it is the attribute `near_storage` of the real keys.
    """

    def __init__(self, layer: "_Layer", key: torch.Tensor, value: torch.Tensor) -> None:
        self.layer, self.key, self.value = layer, key, value

    @property
    def near_storage(self) -> "NewTokens":
        """Itself: found alike on real keys and in their place."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise _unsupported(
            f"another attention function (it asks for {name!r})", "use nearflash.inference.attach(model)"
        )

    def append_in_background(self, kept: torch.Tensor | None) -> None:
        """Append behind the computation. `kept` (batch, t): tokens that are no padding; None: all."""
        cache = self.layer.cache
        self.layer.waiting = None
        cache.batch_sequences(len(self.key))
        cache.behind.submit(partial(self._append, kept))

    def attend(self, query: torch.Tensor, kept: torch.Tensor | None, scaling: float | None) -> torch.Tensor:
        """Append, then attend with query (batch, heads, 1, d); the output, alike. Zero for a row without any token."""
        layer, engine = self.layer, self.layer.cache.engine
        layer.waiting = None
        layer.cache.behind.wait()
        sequences = layer.cache.batch_sequences(len(query))
        self._append(kept)
        batch, heads, _, dim = query.shape
        q = _fp16("query", layer.index, query).reshape(batch, engine.kv_heads, heads // engine.kv_heads, dim)
        full = [row for row, tokens in enumerate(layer.tokens) if tokens]
        out = np.zeros(q.shape, np.float32)
        if full:
            out[full] = engine.attend(layer.index, [sequences[row] for row in full], q[full], scaling)
        return torch.from_numpy(out).reshape(query.shape).to(query)

    def _append(self, kept: torch.Tensor | None) -> None:
        layer = self.layer
        k, v = (_fp16(name, layer.index, x) for name, x in (("key", self.key), ("value", self.value)))
        chosen = [slice(None)] * len(k) if kept is None else list(kept.cpu().numpy())
        layer.tokens = layer.tokens or [0] * len(k)
        for row, (sequence, columns) in enumerate(zip(layer.cache.sequences, chosen, strict=True)):
            new_k, new_v = k[row][:, columns], v[row][:, columns]
            if new_k.shape[1]:
                layer.cache.engine.append(sequence, layer.index, new_k, new_v)
                layer.tokens[row] += new_k.shape[1]


class _Layer(CacheLayerMixin):
    """One layer of the model: it counts tokens (padding too) and hands them on."""

    def __init__(self, cache: NearflashCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index
        self.length = 0
        self.tokens: list[int] = []
        """Tokens stored, by row."""
        self.waiting: NewTokens | None = None
        """What no attention function has taken yet."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to allocate."""
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Real tensors in the first call of several tokens; in decode twice what the attention function takes."""
        if torch.compiler.is_compiling():
            _refuse_compilation()
        if self.waiting is not None:
            raise _unsupported("another attention function", "use nearflash.inference.attach(model)")
        tokens = key_states.shape[-2]
        if tokens > 1 and self.length:
            raise _unsupported(
                f"{tokens} new tokens at once after {self.length} stored ones",
                "pass prefill_chunk_size=1 to generate, or all tokens with a new cache",
            )
        self.is_initialized = True
        self.length += tokens
        self.waiting = NewTokens(self, key_states, value_states)
        if tokens == 1:
            return self.waiting, self.waiting
        key_states.near_storage = self.waiting
        return key_states, value_states

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
        raise _unsupported("a reset of one layer", "reset the cache")

    def crop(self, *_: Any) -> None:
        """Unsupported: pages are programmed once."""
        raise _unsupported("crop", "generate without an assistant, or start with a new cache")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Unsupported: beams would share pages."""
        raise _unsupported("reordering, which beam search needs", "generate with num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Unsupported: rows would share pages."""
        raise _unsupported("repeated rows", "repeat the prompts")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Unsupported: rows are sequences of the engine."""
        raise _unsupported("a selection of rows", "start with a new cache")


def _unsupported(what: str, advice: str) -> UnsupportedError:
    return UnsupportedError(f"KV on flash must be used without {what}: {advice}")


@torch.compiler.disable(reason="KV on flash must be used without torch.compile")
def _refuse_compilation() -> None:
    raise _unsupported("torch.compile", "call the model itself")


def _fp16(name: str, layer: int, states: torch.Tensor) -> NDArray[np.float16]:
    stored = states.detach().to("cpu", torch.float16).contiguous()
    if not torch.isfinite(stored).all():
        largest = states.abs().max().item()
        raise NonFiniteError(f"{name} of layer {layer} must be finite in fp16 (at most 65504), not {largest:g}")
    return stored.numpy()
