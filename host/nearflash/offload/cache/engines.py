"""Engines of nearflash.inference that hold the KV cache of a plan's batches, whole batches each, by tier.

    device    attend devices: the plan's share of near-storage devices, or all where it has none and devices are given
    disk      a file: in the folder for scratch, or files that are given
    memory    a file behind the page cache, as in generation without a plan

An engine holds what an attention policy chooses from, or what lies on devices or in files that were named; keys and
values of everything else lie in a TieredCache.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.inference import AttentionMode, AttentionPolicy, open_engine
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.engines.array import CsdArray
from nearflash.inference.engines.base import Engine
from nearflash.inference.engines.device.window import WindowEngine
from nearflash.inference.engines.store import StoreEngine
from nearflash.inference.policy.estimate import index_bytes, read_fraction
from nearflash.inference.setup import CPU, default_layout
from nearflash.offload.cache.block import BatchShape, BlockShape
from nearflash.offload.tiers.ledger import Ledger
from nearflash.planning.placement import place_units
from nearflash.planning.policy import OffloadPolicy
from nearflash.storage.kv import KvLayout, KvShape
from nearflash.support.closing import Closing

__all__ = ["BlockEngines", "KvPlaces", "check_engines", "engine_read_fraction", "engine_tiers"]

DEVICE, DISK, MEMORY = "device", "disk", "memory"


@dataclass(frozen=True)
class KvPlaces:
    """Devices and files on which engines keep keys and values, as `open_engine` takes them.

    devices: attend devices; none: the host's processor attends, or the GPU that the model is on (`cuda`). num_devices,
    stripe_ratio, nand_block_pages, cache_bytes, layout, read_ahead: see `open_engine`. paths: files of the disk's
    share, or of all where the plan has none there; of attend devices, those on their drives.
    """

    devices: tuple[str, ...] = ()
    num_devices: int = 1
    stripe_ratio: tuple[float, ...] | None = None
    nand_block_pages: int = 0
    paths: tuple[Path, ...] = ()
    cache_bytes: int = 256 << 20
    layout: KvLayout | None = None
    read_ahead: bool = False

    @property
    def attends_on_device(self) -> bool:
        """Whether near-storage devices attend, not the host's processor or a GPU."""
        return any(name.split(":")[0] not in ("cpu", "cuda") for name in self.devices)


def engine_tiers(
    policy: OffloadPolicy, attention: AttentionPolicy | None, places: KvPlaces, batches: int, *, always: bool = False
) -> list[str]:
    """Tier of each of a block's first batches that engines hold; the batches behind them have a TieredCache.

    always: engines hold all of them.
    """
    if places.attends_on_device and not policy.cache.device:
        return [DEVICE] * batches
    share = policy.cache.device
    tiers = [DEVICE] * (max(1, round(share * batches)) if share else 0)  # a small share is not forgotten
    sparse = attention is not None and (attention.mode is not AttentionMode.DENSE or bool(attention.overrides))
    paths = () if places.attends_on_device else places.paths
    if sparse or paths or places.num_devices > 1 or always:
        rest = place_units(policy.cache, [1] * (batches - len(tiers)))
        on_disk = paths and not policy.cache.disk
        tiers += [DISK if on_disk or tier == "disk" else MEMORY for tier in rest]
    return tiers


def check_engines(
    policy: OffloadPolicy, attention: AttentionPolicy | None, places: KvPlaces, *, always: bool = False
) -> bool:
    """Whether engines hold any batches. Raises CommandError where they are to, of a cache of 4 bits."""
    held = bool(engine_tiers(policy, attention, places, policy.num_batches, always=always))
    if held and policy.cache_bits != 16:
        raise CommandError(
            "cache_bits must be 16 where an attention policy, a path, a device or a stream has the KV cache, not "
            f"{policy.cache_bits}: it is kept in fp16; make a plan with --cache-bits 16"
        )
    return held


def engine_read_fraction(
    attention: AttentionPolicy, shape: KvShape, tokens: int, layout: KvLayout | None = None
) -> float:
    """Bytes that a step of decode reads at most, of those of all K and V of so many tokens: what is chosen, and the
    index, but for kvswap's, which is in memory."""
    if attention.mode is AttentionMode.DENSE and not attention.overrides:
        return 1.0
    layout = layout or default_layout(shape.dim, attention, tokens)
    on_disk = attention.mode is not AttentionMode.KVSWAP
    index = on_disk * index_bytes(shape, layout, tokens) / (tokens * shape.token_bytes)
    return min(1.0, read_fraction(attention, shape, layout, tokens) + index)


class BlockEngines(Closing):
    """Engines with room for the largest of some blocks, open. Close it, or use it as a context manager.

    given: for all of the batches that engines hold, in place of those that would be opened; it stays open. always:
    engines hold all batches, also where a TieredCache could. A tier's bytes are taken from `ledger`, which counts at
    the end what moved. Raises CommandError beyond a budget, what `check_engines` and `open_engine` raise.
    """

    def __init__(
        self, config: Any, policy: OffloadPolicy, attention: AttentionPolicy | None, places: KvPlaces,
        shapes: Sequence[BlockShape], *, ledger: Ledger, scratch: Path | None, given: Engine | None = None,
        always: bool = False,
    ) -> None:  # fmt: skip
        check_engines(policy, attention, places, always=always)
        self._policy, self._attention, self._places = policy, attention, places
        self._ledger, self._scratch, self._given, self._always = ledger, scratch, given, always
        self._engines: dict[str, Engine] = {}
        self._held: list[tuple[str, int]] = []
        held = [list(zip(self.tiers(len(shape.batches)), shape.batches, strict=False)) for shape in shapes]
        try:
            for tier in (DEVICE, DISK, MEMORY) if given is None else ():
                own = [[batch for name, batch in block if name == tier] for block in held]
                if any(own):
                    self._open(config, tier, own)
        except BaseException:
            self.close()
            raise

    def tiers(self, batches: int) -> list[str]:
        """See engine_tiers."""
        return engine_tiers(self._policy, self._attention, self._places, batches, always=self._always)

    def of(self, batch: int, batches: int) -> Engine | None:
        """The engine of a batch of a block of so many; None where it has a TieredCache."""
        tiers = self.tiers(batches)
        if batch >= len(tiers):
            return None
        return self._given or self._engines[tiers[batch]]

    def close(self) -> None:
        """Count what moved and close what was opened; may be called twice."""
        while self._engines:
            tier, engine = self._engines.popitem()
            self._count(tier, engine)
            engine.close()
        while self._held:
            self._ledger.give(*self._held.pop())

    def _open(self, config: Any, tier: str, blocks: Sequence[Sequence[BatchShape]]) -> None:
        shape, places = kv_shape_of(config), self._places
        heads = config.get_text_config(decoder=True).num_attention_heads
        self._query_bytes = 2 * shape.dim * heads // shape.kv_heads  # fp16, of the query heads of one KV head
        tokens = max(batch.tokens for block in blocks for batch in block)
        sequences = max(sum(batch.sequences for batch in block) for block in blocks)
        size_bytes = sequences * tokens * shape.token_bytes
        for kind, taken in ((tier if tier != MEMORY else "host", size_bytes), ("host", places.cache_bytes)):
            if kind != DEVICE:
                taken = min(taken, size_bytes)
                self._ledger.take(kind, taken, "the KV cache of the attention policy")
                self._held.append((kind, taken))
        devices = places.devices if tier == DEVICE or not places.attends_on_device else ()
        options: dict[str, Any] = {
            "tokens": tokens, "sequences": sequences, "layout": places.layout, "device": devices or CPU,
            "stripe_ratio": places.stripe_ratio, "cache_bytes": places.cache_bytes, "num_devices": places.num_devices,
            "read_ahead": places.read_ahead,
        }  # fmt: skip
        attention = self._attention or AttentionPolicy(AttentionMode.DENSE)
        own = () if places.attends_on_device else places.paths
        if tier == DEVICE:
            options |= {"nand_block_pages": places.nand_block_pages, "path": places.paths or None}
            self._engines[tier] = open_engine(shape, attention, **options)
        elif tier == MEMORY or own:
            paths = own if tier == DISK else None
            self._engines[tier] = open_engine(shape, attention, path=paths, **options)
        else:
            if self._scratch is not None and not self._scratch.is_dir():
                raise CommandError(f"scratch must be a folder, not {str(self._scratch)!r}")
            with tempfile.TemporaryDirectory(prefix=".nearflash-offload-", dir=self._scratch) as folder:
                path = Path(folder) / "kv"  # without a name once it is open: nothing is left of it after a kill
                self._engines[tier] = open_engine(shape, attention, path=path, **options)

    def _count(self, tier: str, engine: Engine) -> None:
        """Add what a tier's link carried: pages of files; of a device K and V, queries, and outputs back; of one with a
        window what crossed its links."""
        parts = engine.engines if isinstance(engine, CsdArray) else (engine,)
        stores = [part.store for part in parts if isinstance(part, StoreEngine)]
        windows = [part for part in parts if isinstance(part, WindowEngine)]
        if tier == DEVICE and windows:
            for window in windows:
                for link, size_bytes in window.link_bytes.items():
                    self._ledger.count_bytes(f"cache {link}", size_bytes)
        elif tier == DEVICE:
            queries = engine.counters.heads * self._query_bytes
            appended = sum(store.statistics.host_bytes for store in stores)
            self._ledger.count_bytes("cache host to device", appended + queries)
            self._ledger.count_bytes("cache device to host", queries)
        elif tier == DISK:
            self._ledger.count_bytes("cache host to disk", sum(store.statistics.programmed_bytes for store in stores))
            self._ledger.count_bytes("cache disk to host", sum(engine.counters.flash_bytes.values()))
