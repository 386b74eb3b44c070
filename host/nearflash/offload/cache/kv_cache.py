"""A transformers cache whose layers' keys and values lie on tiers, and come to where they are computed with in time."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.decoder import own_layer
from nearflash.offload.cache.host_attention import HostAttention
from nearflash.offload.cache.kv_storage import KvForm, KvStorage
from nearflash.offload.tiers.ledger import CACHE_WAIT, Ledger
from nearflash.offload.tiers.link import DeviceLink, StagedBuffer
from nearflash.support.buffers import BufferPool
from nearflash.support.prefetch import Prefetcher
from nearflash.support.write_behind import WriteBehind

__all__ = ["BlockMover", "CacheMover", "TieredCache", "TieredLayer", "find_cached_layers"]

Arrival: TypeAlias = tuple[Any, Tensor, tuple[Tensor, Tensor]]
"""The link's mark, where new keys and values go, (2, sequences, heads, tokens, d), and themselves."""

_WINDOWS = ("sliding_attention", "chunked_attention")


def find_cached_layers(config: Any) -> dict[int, int | None]:
    """Numbers of the layers whose keys and values can lie on any tier, with their windows; the others' stay in memory.

    Those with full attention, or with a window, whose keys and values have the same dimension.
    """
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    windows: dict[int, int | None] = {}
    for number, (kind, arguments) in enumerate(zip(kinds, options, strict=True)):
        if kind == "full_attention" or kind in _WINDOWS:
            windows[number] = arguments.get("sliding_window")
    return windows


class CacheMover:
    """Loads keys and values ahead of their visit, and stores what a visit added behind it, in threads.

    buffers: of `buffer_bytes` each in the memory of what attends, `tier`; a visit has one of them. staged_bytes: of the
    staging buffer of the host that each has beside it, where that is another memory. depth: visits that may wait until
    what they added is stored; None: as many as there are buffers.
    """

    def __init__(
        self, link: DeviceLink, ledger: Ledger, buffers: int, buffer_bytes: int, overlap: bool = True, *,
        staged_bytes: int = 0, tier: str = "gpu", depth: int | None = None,
    ) -> None:  # fmt: skip
        self.link, self.ledger, self.overlap = link, ledger, overlap
        self._held = [(tier, buffers * buffer_bytes)]
        if not link.one_memory:
            self._held.append(("host", buffers * staged_bytes))
        for tier, size_bytes in self._held:
            ledger.take(tier, size_bytes, "buffers of the KV cache")
        every = [link.buffer(buffer_bytes, staged_bytes) for _ in range(buffers)]
        self.staging = [buffer.host for buffer in every if len(buffer.host)]
        """What storage reads to and writes from."""
        self._free = BufferPool("the KV cache", every)
        # Apart from each other: loads that wait for a buffer must not hold up the stores that free one.
        self._loads = Prefetcher("nearflash-cache-load", self._load, pool=self._free)
        depth = buffers if depth is None else depth
        self._stores = WriteBehind(depth if overlap else 0, "nearflash-cache-store")

    def begin(self, layer: "TieredLayer") -> None:
        """Begin to load a layer's keys and values, if it has to be."""
        if self.overlap and layer.storage is not None:
            self._loads.begin(layer)

    def ready(self, layer: "TieredLayer") -> None:
        """Wait until the layer's keys and values are in the tier that computes with them, and view them as states."""
        if layer.storage is None:
            if layer.storing is not None:
                with self.ledger.span(CACHE_WAIT):
                    layer.storing.result()
            return
        with self.ledger.span(CACHE_WAIT):
            layer.buffer = self._loads.take(layer) if layer in self._loads else self._load(layer)
        self.link.before_use(layer.buffer)
        layer.work = layer.storage.states(layer.buffer.memory)

    def finish(self, layer: "TieredLayer") -> None:
        """The visit is over: store what it added."""
        if layer.buffer is None:
            if layer.arriving:
                layer.storing = self._stores.submit(self._land, layer, layer.take_arriving())
            return
        first, last, layer.work = layer.stored, layer.length, None
        self.link.after_use(layer.buffer)
        layer.storing = self._stores.submit(self._store, layer, layer.buffer, first, last, layer.take_arriving())
        layer.stored, layer.buffer = last, None

    def drain(self) -> None:
        """Wait for what is being stored, and drop what was loaded: all buffers are free. Raises what storing raised."""
        self._loads.drop()
        self._stores.wait()

    def close(self) -> None:
        """End the threads and free the buffers; may be called twice."""
        self._loads.close()  # before the stores that a load may wait for
        self._stores.close()
        while self._held:
            self.ledger.give(*self._held.pop())

    def _load(self, layer: "TieredLayer") -> StagedBuffer:
        if layer.storing is not None:
            layer.storing.result()  # handed over earlier, so it is never behind this load
        with self._free.fill() as buffer:
            self.link.before_fill(buffer)
            if layer.stored and layer.storage is not None:
                with self.ledger.span("load cache", layer=layer.number):
                    layer.storage.load_over(self.link, buffer, layer.first_visible, layer.stored)
        return buffer

    def _land(self, layer: "TieredLayer", arriving: "list[Arrival]") -> None:
        """Have a prompt's keys and values, which a GPU computed, in the host's memory."""
        assert layer.host is not None
        with self.ledger.span("store cache", layer=layer.number):
            for arrival in arriving:
                layer.host.land(*arrival)

    def _store(
        self, layer: "TieredLayer", buffer: StagedBuffer, first: int, last: int, arriving: "list[Arrival]"
    ) -> None:
        try:
            storage = layer.storage
            assert storage is not None
            if arriving:
                self._land(layer, arriving)
            with self.ledger.span("store cache", layer=layer.number):
                self.link.before_fill(buffer)
                storage.store_over(self.link, buffer, first, last)
        except BaseException as error:
            self._free.close(error)  # what was submitted after it is not stored, and frees no buffer
            raise
        finally:
            self._free.release(buffer)


class BlockMover:
    """The movers of a block, as one: of what the memory that computes attends to, and, where there is one, of what the
    host does beside it.
    """

    def __init__(self, near: CacheMover, host: CacheMover | None = None) -> None:
        self._near, self._host = near, host
        self.overlap = near.overlap
        """Whether anything goes on beside computing."""

    def begin(self, layer: "TieredLayer") -> None:
        """See CacheMover.begin."""
        self._of(layer).begin(layer)

    def ready(self, layer: "TieredLayer") -> None:
        """See CacheMover.ready."""
        self._of(layer).ready(layer)

    def finish(self, layer: "TieredLayer") -> None:
        """See CacheMover.finish."""
        self._of(layer).finish(layer)

    def drain(self) -> None:
        """See CacheMover.drain."""
        for mover in self._every():
            mover.drain()

    def close(self) -> None:
        """See CacheMover.close."""
        for mover in self._every():
            mover.close()

    @property
    def staging(self) -> list[Tensor]:
        """Memory that storage reads to and writes from."""
        return [memory for mover in self._every() for memory in mover.staging]

    def _every(self) -> list[CacheMover]:
        return [self._near] if self._host is None else [self._near, self._host]

    def _of(self, layer: "TieredLayer") -> CacheMover:
        return self._near if layer.host is None or self._host is None else self._host


class TieredLayer(CacheLayerMixin):
    """Keys and values of one layer and one batch, in memory that is computed with (`home`), or in `storage`.

    host: attends to them in the host's memory, where a GPU computes the rest; None: what computes attends.
    """

    is_croppable = False

    def __init__(
        self, number: int, form: KvForm, window: int | None, home: Tensor | None, storage: KvStorage | None, *,
        host: HostAttention | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.number, self.storage, self.host = number, storage, host
        self.arriving: list[Arrival] = []
        self.length = self.stored = 0
        """Tokens of each row, padding included: seen, and at rest."""
        self.is_sliding = window is not None
        self.window, self._form = window, form
        self._rows = slice(0, form.batch)
        self.work: Tensor | None = None if home is None else form.dense.states(home)
        self.storing: Future[None] | None = None
        self.buffer: StagedBuffer | None = None

    @property
    def first_visible(self) -> int:
        """The first token that new ones attend to."""
        return 0 if self.window is None else max(self.length - self.window + 1, 0)

    @contextmanager
    def part(self, rows: slice) -> Iterator[None]:
        """Inside of the block, `update` is of some sequences of the batch; with the last of them the visit's tokens
        are there.
        """
        self._rows = rows
        try:
            yield
        finally:
            self._rows = slice(0, self._form.batch)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Check that the model's keys and values are those that there is room for. Raises UnsupportedError."""
        form, sequences = self._form, self._rows.stop - self._rows.start
        for states in (key_states, value_states):
            given = (*states.shape[:2], states.shape[3], states.dtype)
            if given != (sequences, form.heads, form.dim, form.dtype):
                wanted = f"{sequences} sequences, {form.heads} KV heads of {form.dim} {form.dtype}"
                raise UnsupportedError(f"keys and values of layer {self.number} must be of {wanted}, not {given}")
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All visible keys and values, the new ones last. Raises UnsupportedError beyond the room there is."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, start, end = self.first_visible, self.length, self.length + key_states.shape[-2]
        if self.work is None or end > self._form.tokens:
            raise UnsupportedError(f"layer {self.number} must be visited in its turn, by {self._form.tokens} tokens")
        states = self.work[:, self._rows]
        if self._rows.stop == self._form.batch:
            self.length = end
        if self.host is None:
            states[0, :, :, start:end], states[1, :, :, start:end] = key_states, value_states
            return states[0, :, :, first:end], states[1, :, :, first:end]
        if start:
            return self.host.ask(key_states, states[..., first:end, :], self.number), value_states
        self.arriving.append((self.host.link.mark(), states[..., :end, :], (key_states, value_states)))
        return key_states, value_states

    @property
    def attends_on_host(self) -> bool:
        """Whether the host attends at the next visit: a prompt is attended to where it is computed."""
        return self.host is not None and self.length > 0

    def take_arriving(self) -> "list[Arrival]":
        """Take what was computed of a prompt and is not in the host's memory yet."""
        arriving, self.arriving = self.arriving, []
        return arriving

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that a mask is for."""
        first = self.first_visible
        return self.length + query_length - first, first

    def get_seq_length(self) -> int:
        """Tokens of each row, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """No limit but the window's: -1."""
        return -1 if self.window is None else self.window


class TieredCache(Cache):
    """The cache of one batch: `tiered` layers by number, transformers' own for the others."""

    keeps_kv = True
    """A model must not put another cache in its place (nearflash.inference.cache.guard)."""

    def __init__(self, config: Any, tiered: dict[int, TieredLayer]) -> None:
        count = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[tiered.get(number) or own_layer(config, number) for number in range(count)])
        self.tiered = tiered
