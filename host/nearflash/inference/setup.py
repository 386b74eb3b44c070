"""Engines by name, with stores as large as a job needs."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import lcm
from pathlib import Path
from typing import Any

import torch

from nearflash.abi.attention.codeword import CODEWORD_BYTES
from nearflash.abi.attention.pages import DEVICE_GROUP_TOKENS, IndexFormat, TokenLayout
from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.abi.kernel.config import AttendConfig, attend_config
from nearflash.device import open_device
from nearflash.device.base import Device
from nearflash.device.registry import full_name
from nearflash.inference.engines.array import CsdArray, split_heads
from nearflash.inference.engines.base import Engine
from nearflash.inference.policy.estimate import READ_DEPTH
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.flash.base import Flash
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import PAGE_BYTES_LEAST, PAGE_BYTES_MOST, FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.flash.window import WindowFlash
from nearflash.storage.io.profile import DriveProfile, find_profile, queue_backend
from nearflash.storage.kv import DEFAULT_SUFFIX_BYTES, KvLayout, KvShape, KvStore, open_kept_store

__all__ = [
    "CPU",
    "CUDA",
    "check_gpu",
    "check_policy",
    "default_layout",
    "drive_profile",
    "flash_geometry",
    "is_gpu",
    "open_engine",
    "split_cache",
    "split_parts",
]

CPU, CUDA = "cpu", "cuda"
"""The names of CpuEngine, and (with or without :N) of GpuEngine; any other one is a device's."""
_GROUPS_MIN = 64
"""Of a sequence: from fewer, larger ones the policy would choose too coarsely."""
_RATE_MIN = 0.5
"""Of a drive's fastest reads, in pages of the size that is chosen for it."""
_PAGES_PER_BLOCK = 64
_INDEX_FORMATS = ((4096, IndexFormat.INT4), (1024, IndexFormat.INT8))
"""Fewest tokens of a sequence for each; fp16 below."""
_LUNS = 2
_SPARE_BLOCKS = 4
"""Of each LUN queue, beside those that data fills: two being written, some for garbage collection."""
_PARTIAL_GROUPS = 2
"""Of each head of a sequence: its last tokens, where it is kept, and those of before until they are durable."""


def is_gpu(device: str) -> bool:
    """Whether it is one of torch's, `cuda` or `cuda:N`; the model must be on it then."""
    return device.split(":")[0] == CUDA


def check_gpu(device: str) -> None:
    """Raise UnsupportedError unless torch can use this GPU."""
    number, gpus = device.partition(":")[2] or "0", torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number.isdecimal() or int(number) >= gpus:
        raise UnsupportedError(f"device {device!r} must be a GPU that torch can use; it finds {gpus or 'none'}")


def open_engine(
    shape: KvShape, policy: AttentionPolicy, *, tokens: int, sequences: int, device: str | Sequence[str] = CPU,
    num_devices: int = 1, path: Path | Sequence[Path] | None = None, stripe_ratio: Sequence[float] | None = None,
    nand_block_pages: int = 0, layout: KvLayout | None = None, cache_bytes: int = 0,
    suffix_bytes: int = DEFAULT_SUFFIX_BYTES, keep: bool = False, read_ahead: bool = False,
) -> Engine:  # fmt: skip
    """An engine with room for `sequences` of up to `tokens` tokens each; of several devices or files a CsdArray.

    Device `cpu` is the CpuEngine, `cuda` (or `cuda:1`) a GpuEngine, for a model on that GPU; `cache_bytes` are of the
    GPU's memory then. Both keep pages in a file: `path`, by direct I/O (its name with .0, .1, … for several
    devices); or, by default, one that is deleted when it is closed, through the page cache. Of what it reads, up to
    `cache_bytes` stay in memory, the index before KV page groups. Any other device keeps pages in its memory; or on its
    NAND, where `nand_block_pages` gives the pages of one of its blocks; or, with a `path`, in a new file on its drive,
    of which `cache_bytes` of its memory (at most half of it, the default) are a window (WindowEngine).
    Several devices, by name or `num_devices` of one, or several files, for example on several drives, share the KV
    heads: equally, or by `stripe_ratio`, a number for each; every one has a head at least.
    Unindexed suffixes stay in memory up to `suffix_bytes` (KvStore), unless their pages are in a device's memory.
    With `keep` the sequences in `path` outlast the engine, a crash too: where the file is there it is opened, as large
    as it is, and `lengths` has what it holds (nearflash.storage.kv.open_kept_store).
    read_ahead: of device `cpu` with one file (CpuEngine).
    Raises CommandError for NAND where there is none or beside a path, for lists of unequal lengths, and for an index of
    policy kvswap that is larger than `cache_bytes`; ConfigError for more devices than KV heads; UnsupportedError for
    heads that need more pages than a window has, and as `check_policy` does; what opening raises.
    """
    parts = split_parts(shape.kv_heads, device, num_devices, path, stripe_ratio)
    check_policy(policy, [name for name, _, _ in parts], read_ahead=read_ahead)
    if keep and (parts[0][1] is None or len(parts) > 1):
        raise CommandError("keep must be False without a path, and with several devices: there sequences are not kept")
    for name, file, _ in parts:
        _check_place(name, file, nand_block_pages)
    if layout is None:
        profile = drive_profile(parts[0][1]) if _has_file(parts[0][0]) else None
        layout = default_layout(shape.dim, policy, tokens, profile, _drive_page_bytes(parts))
    ends, engines = accumulate(count for _, _, count in parts), list[Engine]()
    try:
        for (name, file, count), end in zip(parts, ends, strict=True):
            part = replace(shape, kv_heads=count)
            if _has_file(name):
                sizes = cache_bytes // len(parts), suffix_bytes // len(parts)
                gpu = name if is_gpu(name) else ""
                options: dict[str, Any] = {"first": end - count, "keep": keep, "gpu": gpu, "read_ahead": read_ahead}
                engines.append(_file(part, policy, layout, tokens, sequences, file, *sizes, **options))
            else:
                window = file, cache_bytes // len(parts)
                flash = partial(_device_flash, part, layout, tokens, sequences, nand_block_pages, *window)
                kept = suffix_bytes // len(parts) if nand_block_pages or file else 0
                engines.append(_device(name, part, policy, layout, flash, end - count, kept, tokens))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines[0] if len(engines) == 1 else CsdArray(engines)


def split_parts(
    kv_heads: int, device: str | Sequence[str], num_devices: int = 1, path: Path | Sequence[Path] | None = None,
    stripe_ratio: Sequence[float] | None = None,
) -> list[tuple[str, Path | None, int]]:  # fmt: skip
    """Device, file and number of KV heads of each part of an engine, as `open_engine` takes them.

    Raises CommandError for lists that do not go together, ConfigError for more parts than heads.
    """
    devices = [device] if isinstance(device, str) else list(device)
    paths: list[Path | None] = [path] if path is None or isinstance(path, Path) else [*path]
    if len(devices) > 1 and num_devices > 1:
        raise CommandError(f"num_devices must be 1 where {len(devices)} devices are named, not {num_devices}")
    if len(paths) > 1 and max(len(devices), num_devices) not in (1, len(paths)):
        raise CommandError(f"path must be one, or one for each device, not {len(paths)} of them")
    devices *= max(num_devices, len(paths)) if len(devices) == 1 else 1
    if len(paths) == 1 < len(devices):
        (one,) = paths
        paths = [None if one is None else one.with_name(f"{one.name}.{number}") for number in range(len(devices))]
    ratio = [1.0] * len(devices) if stripe_ratio is None else list(stripe_ratio)
    if len(ratio) != len(devices):
        raise CommandError(f"stripe_ratio must have a number for each of {len(devices)} devices or files, not {ratio}")
    return list(zip(devices, paths, split_heads(kv_heads, ratio), strict=True))


def check_policy(policy: AttentionPolicy, devices: Sequence[str], *, read_ahead: bool = False) -> None:
    """Raise UnsupportedError for a policy, or reads ahead, that the devices of an engine's parts do not have."""
    if list(devices) == [CPU]:
        return
    if read_ahead:
        raise UnsupportedError(f"read_ahead must be on device cpu, with one file, not on {', '.join(devices)}")
    if policy.mode is AttentionMode.KVSWAP:
        raise UnsupportedError(
            "attention kvswap must be on device cpu, with one file, as it chooses by all heads at once from the host's "
            f"memory, not on {', '.join(devices)}"
        )


def _has_file(device: str) -> bool:
    return device == CPU or is_gpu(device)


def _check_place(device: str, path: Path | None, nand_block_pages: int) -> None:
    """Raise CommandError for a path or NAND that a device has not, UnsupportedError for a GPU that is none."""
    if nand_block_pages and path is not None:
        raise CommandError(f"path must be left out with nand_block_pages: pages of {device!r} are on its NAND then")
    if _has_file(device) and nand_block_pages:
        raise CommandError(
            f"nand_block_pages must be 0 with device {device}, which has no NAND, not {nand_block_pages}"
        )
    if is_gpu(device):
        check_gpu(device)


def default_layout(
    dim: int, policy: AttentionPolicy, tokens: int, profile: DriveProfile | None = None, device_page_bytes: int = 0
) -> KvLayout:
    """Pages as large as the drive's profile asks for, else 4 KiB; K and V of a token together unless tokens are chosen.

    device_page_bytes: the largest page of a device that reads them from its drive, where K and V are always together.

    A row of an index block fills a codeword: 1,024 tokens of int4, 512 of int8, 256 of fp16. What lies after
    the last whole block is scored from its KV page groups, so short contexts take short blocks, of wider elements; and
    smaller pages, so that there are groups to choose among. Single tokens are read from the smallest pages.
    """
    interleaved = policy.mode is AttentionMode.DENSE or policy.chooses_groups or device_page_bytes > 0
    page_bytes = device_page_bytes or (_page_bytes(profile) if interleaved and profile else PAGE_BYTES_LEAST)
    form = next((form for least, form in _INDEX_FORMATS if tokens >= least), IndexFormat.FP16)
    if policy.mode is AttentionMode.DENSE:
        form = IndexFormat.INT4  # scores nothing; its long blocks leave short contexts in memory
    row_tokens = 8 * CODEWORD_BYTES // form.bits
    while True:
        group = TokenLayout.capacity(page_bytes, dim, interleaved, row_tokens)
        unit, fits = lcm(group, 16), not device_page_bytes or group <= DEVICE_GROUP_TOKENS
        if page_bytes == PAGE_BYTES_LEAST or (group * _GROUPS_MIN <= tokens and unit <= row_tokens and fits):
            return KvLayout(group, interleaved, row_tokens // unit * unit, form, page_bytes)
        page_bytes //= 2


def _drive_page_bytes(parts: Sequence[tuple[str, Path | None, int]]) -> int:
    """The largest pages that attend devices read from their drives; 0 where there are none."""
    names = [name for name, file, _ in parts if not _has_file(name) and file is not None]
    builds = [attend_config(full_name(name, "attend").partition("@")[0].partition(":")[2]) for name in names]
    return min((build.page_bytes for build in builds), default=0)


def _page_bytes(profile: DriveProfile) -> int:
    """The smallest pages that a drive reads at half its fastest rate; else the largest."""
    sizes = [1 << log2 for log2 in range(PAGE_BYTES_LEAST.bit_length() - 1, PAGE_BYTES_MOST.bit_length())]
    least = _RATE_MIN * profile.fastest("read")
    return next((size for size in sizes if profile.rate("random", size, READ_DEPTH) >= least), sizes[-1])


def drive_profile(path: Path | None) -> DriveProfile | None:
    """The profile of the drive that K and V will lie on (None: temporary files'), where its reads were measured.

    Raises StateError for a damaged file of profiles.
    """
    folder = Path(tempfile.gettempdir()) if path is None else path.parent
    profile = find_profile(folder) if folder.is_dir() else None
    return profile if profile is not None and profile.fastest("random") and profile.fastest("read") else None


def flash_geometry(shape: KvShape, layout: KvLayout, tokens: int, sequences: int, channels: int) -> FlashGeometry:
    """Blocks for as many tokens of as many sequences, an eighth more, and what the store needs to work with."""
    queues = channels * _LUNS
    blocks = _queue_blocks(shape, layout, tokens, sequences, queues * _PAGES_PER_BLOCK)
    return FlashGeometry(layout.page_bytes, _PAGES_PER_BLOCK, channels, _LUNS, blocks * queues)


def _queue_blocks(shape: KvShape, layout: KvLayout, tokens: int, sequences: int, pages_each: int) -> int:
    """Blocks of each LUN queue, where one of every queue together hold `pages_each` pages."""
    groups, blocks = tokens // layout.group_tokens + _PARTIAL_GROUPS, tokens // layout.block_tokens
    pages = groups * layout.group_pages + blocks * layout.index_layout(shape.dim).pages
    return -(-pages * shape.layers * shape.kv_heads * sequences * 9 // (8 * pages_each)) + _SPARE_BLOCKS


def _file(
    shape: KvShape,
    policy: AttentionPolicy,
    layout: KvLayout,
    tokens: int,
    sequences: int,
    path: Path | None,
    cache_bytes: int,
    suffix_bytes: int,
    *,
    first: int,
    keep: bool,
    gpu: str,
    read_ahead: bool,
) -> Engine:
    """A CpuEngine, or of a device of torch a GpuEngine: their pages are in a file."""
    geometry = flash_geometry(shape, layout, tokens, sequences, channels=1)
    index, groups = _cache_sizes(cache_bytes, policy, shape, layout, tokens, sequences)
    caches: dict[str, Any] = {"index_cache_bytes": index, "page_cache_bytes": groups}
    options: dict[str, Any] = {"background": True, "suffix_bytes": suffix_bytes}
    name = (gpu or CPU) + ("" if path is None else f" on {path}")
    if path is None:
        with tempfile.TemporaryDirectory(prefix="nearflash-") as folder:
            store = KvStore(FileFlash.create(Path(folder) / "kv", geometry, direct=False), shape, layout, **options)
    elif keep:
        store = open_kept_store(path, shape, layout, geometry, backend=queue_backend(path.parent), **options)
    else:
        store = KvStore(FileFlash.create(path, geometry, backend=queue_backend(path.parent)), shape, layout, **options)
    if gpu:
        from nearflash.inference.engines.gpu.engine import GpuEngine

        return GpuEngine(store, policy, gpu, first_head=first, name=name, **caches)
    from nearflash.inference.engines.cpu.engine import CpuEngine

    return CpuEngine(store, policy, first_head=first, name=name, read_ahead=read_ahead, **caches)


def split_cache(cache_bytes: int, shape: KvShape, layout: KvLayout, tokens: int, sequences: int) -> tuple[int, int]:
    """CpuEngine's `index_cache_bytes` and `page_cache_bytes`: the index is read for every token, so it comes first."""
    from nearflash.inference.engines.paged.index_rows import rows_bytes

    rows = rows_bytes(layout.index_layout(shape.dim), shape.kv_heads, tokens // layout.block_tokens)
    index = min(cache_bytes, sequences * shape.layers * rows)
    return index, cache_bytes - index


def _cache_sizes(
    cache_bytes: int, policy: AttentionPolicy, shape: KvShape, layout: KvLayout, tokens: int, sequences: int
) -> tuple[int, int]:
    """`split_cache` by the policy: kvswap's index is in memory whole. Raises CommandError where it does not fit."""
    if policy.mode is not AttentionMode.KVSWAP:
        return split_cache(cache_bytes, shape, layout, tokens, sequences)
    from nearflash.inference.engines.paged.compact_index import compact_bytes

    rank = shape.kv_heads * policy.resolve(tokens, shape.dim, layout).score_dims
    index = sequences * compact_bytes(shape, rank, tokens)
    if index > cache_bytes:
        raise CommandError(f"cache_bytes must be {index} at least, for the index of policy kvswap, not {cache_bytes}")
    return 0, cache_bytes - index


def _device(
    spec: str, shape: KvShape, policy: AttentionPolicy, layout: KvLayout, make: Callable[[Device], Flash], first: int,
    suffix_bytes: int, tokens: int,
) -> Engine:  # fmt: skip
    from nearflash.inference.engines.device.engine import DeviceEngine
    from nearflash.inference.engines.device.window import WindowEngine

    device = open_device(spec, "attend")
    try:
        store = KvStore(make(device), shape, layout, suffix_bytes=suffix_bytes)
        if not isinstance(store.flash, WindowFlash):
            return DeviceEngine(device, store, policy, first_head=first)
        engine = WindowEngine(device, store, policy, first_head=first)
        engine.check_room(tokens)
        return engine
    except BaseException:
        device.close()
        raise


def _device_flash(
    shape: KvShape, layout: KvLayout, tokens: int, sequences: int, nand_block_pages: int, path: Path | None,
    window_bytes: int, device: Device,
) -> Flash:  # fmt: skip
    """The device's memory, its drive, or its NAND."""
    config = device.identity.config
    if not isinstance(config, AttendConfig):
        raise CommandError(f"device must be an attend kernel, not {config.full_name}")
    if not nand_block_pages:
        geometry = flash_geometry(shape, layout, tokens, sequences, config.channels)
        if path is None:
            return MemoryFlash(device, geometry)
        most = device.memory_bytes // 2 or window_bytes
        return WindowFlash(device, path, geometry, min(window_bytes or most, most), backend=queue_backend(path.parent))
    blocks = _queue_blocks(shape, layout, tokens, sequences, nand_block_pages * config.channels * max(config.luns, 1))
    return NandFlash(device, pages_per_block=nand_block_pages, blocks_per_lun=blocks, paired=not layout.interleaved)
