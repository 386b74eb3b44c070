"""Memory and file of a block of batches: its caches and hidden states on their tiers."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nearflash.abi.errors import CommandError
from nearflash.inference.cache.decoder import head_counts
from nearflash.offload.cache.host_attention import HostAttention
from nearflash.offload.cache.kv_cache import BlockMover, CacheMover, TieredCache, TieredLayer, find_cached_layers
from nearflash.offload.cache.kv_storage import DiskStorage, KvForm, KvStorage, MemoryStorage
from nearflash.offload.tiers.activations import Parked, StatesFile
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink, host_memory
from nearflash.planning.placement import place_units
from nearflash.planning.policy import VISITS_AHEAD, OffloadPolicy, attends_on_host
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.io.profile import queue_backend
from nearflash.support.closing import Closing

__all__ = ["BatchShape", "Block", "BlockShape"]

_BUFFERS = VISITS_AHEAD + 1
"""Of the KV cache: one is computed with, and stored before long; the others are loaded."""


class BatchShape(NamedTuple):
    """Sequences of a batch, and tokens that each of them may become, padding included."""

    sequences: int
    tokens: int


@dataclass(frozen=True)
class BlockShape:
    """The shapes of a block's batches."""

    batches: tuple[BatchShape, ...]
    prompt_tokens: int
    """Of the longest prompt."""


class Block(Closing):
    """Room for the largest block; the caches of one block after another. Close it, or use it as a context manager.

    owns: whether a layer's cache is here; of another rank's the tokens alone are counted. in_engines: how many batches
    of a block of so many have their cache elsewhere, the first ones. attend: has the host attend, where a GPU computes
    the rest (HostAttention).
    Everything is reserved here: raises CommandError beyond a budget, StorageFullError where the disk has no room.
    """

    def __init__(
        self, config: Any, dtype: torch.dtype, policy: OffloadPolicy, shapes: Sequence[BlockShape], *, link: DeviceLink,
        ledger: Ledger, scratch: Path | None, owns: Callable[[int], bool] = lambda number: True,
        in_engines: Callable[[int], int] = lambda batches: 0,
        attend: Callable[[Callable[[], None]], None] = lambda run: run(),
    ) -> None:  # fmt: skip
        self._config, self._policy, self._link, self._ledger, self._dtype = config, policy, link, ledger, dtype
        self._layers, self._owns, self._in_engines = find_cached_layers(config), owns, in_engines
        self._text = config.get_text_config(decoder=True)
        self._held: list[tuple[str, int]] = []
        self._file: DirectFile | None = None
        self._states: StatesFile | None = None
        self.mover: BlockMover | None = None
        self._host: HostAttention | None = None
        plans = [self._plan(shape) for shape in shapes]
        try:
            for tier in ("gpu", "host"):
                self._take(tier, max(plan.bytes[tier] for plan in plans), "the KV cache")
            self.mover = self._open_mover(plans, attend)
            if disk := max(plan.bytes["disk"] for plan in plans):
                self._take("disk", disk, "KV cache and activations")
                self._file = _scratch_file(scratch, disk)
                self._states = StatesFile(self._file, link, ledger, overlap=policy.overlap)
                for memory in self.mover.staging:
                    self._file.backend.register(memory.numpy())
        except BaseException:
            self.close()
            raise

    def batch(self, shape: BlockShape, number: int) -> tuple[TieredCache, Parked]:
        """The empty cache, and the place of hidden states, of batch `number` of a block."""
        plan = self._plan(shape)
        layers = {unit.layer: self._layer(unit) for unit in plan.units if unit.batch == number}
        tier, offset = plan.parked[number]
        cache = TieredCache(self._config, layers)
        return cache, Parked(tier, self._link, self._states if tier == "disk" else None, offset, plan.states_bytes)

    def close(self) -> None:
        """Free everything; may be called twice."""
        if self.mover is not None:
            self.mover.close()
        if self._host is not None:
            self._host.close()
            self._host = None
        if self._states is not None:
            self._states.close()
        if self._file is not None:
            self._file.close()
        while self._held:
            self._ledger.give(*self._held.pop())

    @property
    def attends_on_host(self) -> bool:
        """Whether the host attends beside a GPU."""
        return self._host is not None

    def _open_mover(self, plans: "Sequence[_Plan]", attend: Callable[[Callable[[], None]], None]) -> BlockMover:
        """The mover of keys and values to where they are attended to: to a GPU, or to buffers of the host."""
        policy, ledger = self._policy, self._ledger
        passing = {tier: max(plan.work_bytes[tier] for plan in plans) for tier in ("gpu", "host")}
        buffers = {tier: (_BUFFERS if policy.overlap else 1) if size else 0 for tier, size in passing.items()}
        staged, rows = max(plan.staged_bytes for plan in plans), max(plan.query_bytes for plan in plans)
        near = CacheMover(self._link, ledger, buffers["gpu"], passing["gpu"], policy.overlap, staged_bytes=staged)
        if not rows:
            return BlockMover(near)
        try:
            self._host = HostAttention(self._link, ledger, rows, attend)
            # A prompt's keys and values stay in the GPU's memory until they are stored: those of one batch at a time.
            host = CacheMover(
                DeviceLink(), ledger, buffers["host"], passing["host"], policy.overlap, tier="host", depth=1
            )
        except BaseException:
            near.close()
            raise
        return BlockMover(near, host)

    def _take(self, tier: str, size_bytes: int, what: str) -> None:
        self._ledger.take(tier, size_bytes, what)
        self._held.append((tier, size_bytes))

    def _layer(self, unit: "_Unit") -> TieredLayer:
        window, form = self._layers[unit.layer], unit.form
        if not self._owns(unit.layer):
            return TieredLayer(unit.layer, form, window, None, None)
        host = self._host if unit.on_host else None
        if unit.in_place:
            home = host_memory(form.size_bytes) if unit.on_host else self._link.far_memory(form.size_bytes)
            return TieredLayer(unit.layer, form, window, home, None, host=host)
        storage: KvStorage
        if unit.tier == "disk":
            assert self._file is not None
            what = f"layer {unit.layer}, batch {unit.batch}"
            storage = DiskStorage(form, self._file, unit.offset, self._ledger, what)
        else:
            is_far = unit.tier == "gpu"
            size = MemoryStorage.rest_bytes(form)
            # Not pinned: torch would take the next power of two of the host's budget.
            memory = self._link.far_memory(size) if is_far else host_memory(size)
            storage = MemoryStorage(form, memory, self._ledger, is_far=is_far)
        return TieredLayer(unit.layer, form, window, None, storage, host=host)

    def _plan(self, shape: BlockShape) -> "_Plan":
        """Units of a block, batch by batch of each layer as they are visited, on their tiers."""
        policy, forms = self._policy, []
        for layer in self._layers:
            heads, dim = head_counts(self._text.per_layer_config[layer])
            for number, batch in enumerate(shape.batches):
                if number < self._in_engines(len(shape.batches)):
                    continue
                form = KvForm(batch.sequences, heads, batch.tokens, dim, self._dtype, policy.cache_bits)
                forms.append((layer, number, form))
        tiers = place_units(policy.cache, [form.size_bytes * self._owns(layer) for layer, _, form in forms])
        plan = _Plan([], {"gpu": 0, "host": 0, "disk": 0}, [])
        for (layer, number, form), tier in zip(forms, tiers, strict=True):
            in_place = form.bits == 16 and (tier == "gpu" or (tier == "host" and policy.cpu_attention))
            on_host = self._attends_on_host(tier, form)
            plan.units.append(_Unit(layer, number, form, tier, in_place, on_host, plan.bytes["disk"]))
            if not self._owns(layer):
                continue
            if tier == "disk":
                plan.bytes["disk"] += DiskStorage.rest_bytes(form)
                plan.bytes["host"] += DiskStorage.tail_bytes
                if not on_host:
                    plan.staged_bytes = max(plan.staged_bytes, DiskStorage.rest_bytes(form))
            else:
                plan.bytes[tier] += form.size_bytes if in_place else MemoryStorage.rest_bytes(form)
            if not in_place:
                near = "host" if on_host else "gpu"
                plan.work_bytes[near] = max(plan.work_bytes[near], KvStorage.work_bytes(form))
            if on_host:
                heads = self._text.per_layer_config[layer].num_attention_heads
                rows = form.batch * (heads + 2 * form.heads) * form.dim * form.dtype.itemsize
                plan.query_bytes = max(plan.query_bytes, rows)
        largest = max(batch.sequences for batch in shape.batches)
        hidden = largest * shape.prompt_tokens * self._text.hidden_size * self._dtype.itemsize
        plan.states_bytes = -(-hidden // BLOCK_BYTES) * BLOCK_BYTES
        for tier in place_units(policy.activations, [1] * len(shape.batches)):
            plan.parked.append((tier, plan.bytes["disk"]))
            plan.bytes["disk" if tier == "disk" else tier] += plan.states_bytes
        return plan

    def _attends_on_host(self, tier: str, form: KvForm) -> bool:
        """Whether the host attends beside a GPU."""
        one_memory = self._link.one_memory
        return (
            self._policy.cpu_attention and tier != "gpu" and not one_memory and attends_on_host(one_memory, form.bits)
        )


@dataclass(frozen=True)
class _Unit:
    """Keys and values of one layer and one batch."""

    layer: int
    batch: int
    form: KvForm
    tier: str
    in_place: bool
    """They are computed with where they lie."""
    on_host: bool
    """The host attends, beside a GPU."""
    offset: int
    """In the file."""


@dataclass
class _Plan:
    """Tiers, places and sizes of everything of a block."""

    units: list[_Unit]
    bytes: dict[str, int]
    parked: list[tuple[str, int]]
    """Tier and offset in the file of each batch's hidden states."""
    work_bytes: dict[str, int] = field(default_factory=lambda: {"gpu": 0, "host": 0})
    """Of the largest unit that passes through a buffer, by the memory that attends."""
    staged_bytes: int = 0
    """Of the largest that comes from disk to a GPU."""
    query_bytes: int = 0
    """Of the largest query, with its new keys and values, that comes to the host."""
    states_bytes: int = 0


def _scratch_file(folder: Path | None, size_bytes: int) -> DirectFile:
    """A file of that size without a name, so that nothing is left of it after a kill. Raises StorageFullError."""
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    if not folder.is_dir():
        raise CommandError(f"scratch must be a folder, not {str(folder)!r}")
    inside = Path(tempfile.mkdtemp(prefix=".nearflash-offload-", dir=folder))
    try:
        file = DirectFile.create(inside / "cache", size_bytes, backend=queue_backend(folder))
        (inside / "cache").unlink()
    finally:
        inside.rmdir()
    return file
