"""Bench `blocks`: a block store's put and get beside its disk, gets under puts, the index at opening, and wear.

rates        GB/s of put and of get, in turns with large direct writes and reads of as many bytes on the same disk;
             the file is full, so that each put evicts
latency      ms of a get of one block while puts are in flight all the time
rebuild      seconds until a file of small blocks is open, for a million blocks
wear         bytes written for each byte put, where half of the gets are of a twentieth of the blocks
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from nearflash.bench.options import Option, check_choices
from nearflash.bench.stopwatch import time_call
from nearflash.storage.blocks import BlockStore
from nearflash.storage.io.bandwidth import Probe
from nearflash.storage.io.direct import aligned_buffer

__all__ = ["MEMORY_BYTES", "Move", "make_noise", "measure_rates", "run"]

Bytes = NDArray[np.uint8]
Move = Callable[[Sequence[bytes]], object]
"""Stores or loads blocks of these keys."""
_BATCH_BYTES, MEMORY_BYTES = 32 << 20, 128 << 20
"""Of blocks put or got in one call, and of all that are put or got over and over."""
_SMALL_BYTES = 4096
_LATENCY_BYTES = 1 << 20
_WEAR_BYTES = 256 << 10
PARTS = ("rates", "latency", "rebuild", "wear")


def run(
    path: Annotated[Path, Option("The folder on the disk to measure.", Path, metavar="FOLDER")] = Path(),
    sizes: Annotated[Sequence[int], Option("Bytes of a block.", int, many=True, metavar="BYTES")] = (
        *(256 << 10, 1 << 20, 4 << 20),
    ),
    turn_bytes: Annotated[int, Option("Bytes put, got, written and read in a turn.", int, metavar="BYTES")] = 1 << 30,
    repeats: Annotated[int, Option("Turns.", int, metavar="N")] = 7,
    gets: Annotated[int, Option("Gets under puts.", int, metavar="N")] = 500,
    file_bytes: Annotated[int, Option("Bytes of the file of latency and wear.", int, metavar="BYTES")] = 1 << 30,
    rebuild_bytes: Annotated[int, Option("Bytes of the file that is opened again.", int, metavar="BYTES")] = 10**10,
    parts: Annotated[
        Collection[str] | None, Option("Measure these parts (default: all).", many=True, choices=PARTS)
    ] = None,
) -> Iterator[dict[str, Any]]:
    """A row for each part, and for each size of blocks. Raises CommandError, StateError, StorageFullError."""
    chosen = check_choices("parts", parts, PARTS)
    memory = make_noise(max(MEMORY_BYTES, *sizes))
    with tempfile.TemporaryDirectory(prefix=".nearflash-probe-", dir=path) as inside:
        file = Path(inside) / "blocks"
        if "rates" in chosen:
            with Probe(Path(inside), turn_bytes) as probe:
                for size in sizes:
                    yield measure_rates(file, probe, memory, size, turn_bytes, repeats)
        if "latency" in chosen:
            yield _latency(file, memory[: file_bytes // 8], file_bytes, gets)
        if "rebuild" in chosen:
            yield _rebuild(file, memory[: rebuild_bytes // 8 // _SMALL_BYTES * _SMALL_BYTES], rebuild_bytes)
        if "wear" in chosen:
            yield _wear(file, memory[: file_bytes // 8], file_bytes)


@contextmanager
def _open(file: Path, capacity_bytes: int, block_bytes: int) -> Iterator[BlockStore]:
    """A new store, which is removed."""
    try:
        with BlockStore(file, capacity_bytes, block_bytes, "bench") as store:
            yield store
    finally:
        file.unlink(missing_ok=True)


def measure_rates(
    file: Path, probe: Probe, memory: Bytes, size: int, turn_bytes: int, repeats: int,
    peers: Mapping[str, Move] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """A row of rates for blocks of `size` bytes, which are parts of `memory`; `peers`: moves of others in each turn."""
    source, target = memory[: len(memory) // size * size].reshape(-1, size), _rows(size)
    count, seen = turn_bytes // size, dict[str, list[float]]()

    def turn(keys: Sequence[bytes]) -> None:
        moves: dict[str, Move] = {
            "disk_write": lambda _: probe.write(count * size), "put": lambda keys: _put(store, keys, source),
            "disk_read": lambda _: probe.read(count * size), "get": lambda keys: _get(store, keys, target), **peers,
        }  # fmt: skip
        for name, move in moves.items():
            seen.setdefault(name, []).append(count * size / time_call(lambda move=move: move(keys)) / 1e9)  # type: ignore[misc]

    with _open(file, 2 * turn_bytes + turn_bytes // 4, size) as store:
        for number in range(3):  # what was never written is not read, nor written, as it will be
            turn(_keys(number, count))
        seen.clear()
        for number in range(repeats):
            turn(_keys(3 + number, count))
    rates = {f"{name}_gb_per_second": statistics.median(values) for name, values in seen.items()}
    return {"part": "rates", "block_kib": size >> 10, **rates,
            "put_roofline_fraction": _fraction(seen["put"], seen["disk_write"]),
            "get_roofline_fraction": _fraction(seen["get"], seen["disk_read"]),
            "of": "median over turns of the rate over that of large direct writes or reads of the same turn",
            "turns": repeats, "turn_bytes": count * size}  # fmt: skip


def _latency(file: Path, memory: Bytes, file_bytes: int, gets: int) -> dict[str, Any]:
    source, target = memory.reshape(-1, _LATENCY_BYTES), _rows(_LATENCY_BYTES)[:1]
    known, seconds, ended = _keys(0, len(source) // 2), list[float](), threading.Event()
    with _open(file, file_bytes, _LATENCY_BYTES) as store:
        _put(store, known, source)
        store.pin(known)

        def put_on() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                _put(store, _keys(number, len(source)), source)

        thread, start = threading.Thread(target=put_on), time.perf_counter()
        thread.start()
        rng = np.random.default_rng(0)
        for number in rng.integers(0, len(known), gets).tolist():
            seconds.append(time_call(lambda key=known[number]: _get(store, [key], target)))  # type: ignore[misc]
        put_bytes, elapsed = store.stats().put_bytes, time.perf_counter() - start
        ended.set()
        thread.join()
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"part": "latency", "block_kib": _LATENCY_BYTES >> 10, "gets": gets, "get_p50_ms": p50, "get_p99_ms": p99,
            "put_gb_per_second": put_bytes / elapsed / 1e9}  # fmt: skip


def _rebuild(file: Path, memory: Bytes, capacity_bytes: int) -> dict[str, Any]:
    source = memory.reshape(-1, _SMALL_BYTES)
    with _open(file, capacity_bytes, _SMALL_BYTES) as store:
        room = store.stats().capacity_blocks
        for start in range(0, room, len(source)):
            _put(store, _keys(start, min(len(source), room - start)), source)
        blocks = store.stats().blocks
        store.close()
        seconds = time_call(lambda: BlockStore(file, capacity_bytes, _SMALL_BYTES, "bench").close())
    return {"part": "rebuild", "block_kib": _SMALL_BYTES >> 10, "measured_blocks": blocks, "measured_seconds": seconds,
            "rebuild_seconds": seconds / blocks * 1e6, "of": "a million blocks, from the measured ones in proportion",
            "file_bytes": capacity_bytes}  # fmt: skip


def _wear(file: Path, memory: Bytes, file_bytes: int) -> dict[str, Any]:
    source, target = memory.reshape(-1, _WEAR_BYTES), _rows(_WEAR_BYTES)
    rng = np.random.default_rng(0)
    with _open(file, file_bytes, _WEAR_BYTES) as store:
        hot = _keys(0, max(store.stats().capacity_blocks // 20, 1))
        for number in range(1, 4 * file_bytes // memory.nbytes):
            keys = _keys(number, len(source))
            for key in hot:
                _put(store, [key], source)
            _put(store, keys, source)
            _get(store, [*hot, *rng.permutation(keys)[: len(hot)].tolist()], target, must_hit=False)
        stats = store.stats()
    return {"part": "wear", "block_kib": _WEAR_BYTES >> 10, "write_amplification": stats.written_per_put,
            "of": "bytes written over bytes put", "put_bytes": stats.put_bytes, "written_bytes": stats.written_bytes,
            "evicted": stats.evicted, "moved": stats.moved}  # fmt: skip


def _put(store: BlockStore, keys: Sequence[bytes], source: Bytes) -> None:
    batch = max(_BATCH_BYTES // source.shape[1], 1)
    rows = [source[number % len(source)] for number in range(len(keys))]
    transfers = [
        store.submit_put(keys[start : start + batch], rows[start : start + batch])
        for start in range(0, len(keys), batch)
    ]
    for transfer in transfers:
        if not all(transfer.result()):
            raise AssertionError("every block that is put must be stored")


def _get(store: BlockStore, keys: Sequence[bytes], target: Bytes, *, must_hit: bool = True) -> None:
    """Batches, as many at one time as their memory has room for."""
    batch = max(_BATCH_BYTES // target.shape[1], 1)
    most, transfers = max(len(target) // batch, 1), list[Any]()
    for start in range(0, len(keys), batch):
        if len(transfers) >= most:
            transfers[start // batch - most].result()
        part = keys[start : start + batch]
        rows = [target[(start + number) % len(target)] for number in range(len(part))]
        transfers.append(store.submit_get(part, rows))
    for transfer in transfers:
        if not all(transfer.result()) and must_hit:
            raise AssertionError("every block that was put last must be served")


def _fraction(own: Sequence[float], disk: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(own, disk, strict=True))


def _keys(number: int, count: int) -> list[bytes]:
    return [b"%d-%d" % (number, index) for index in range(count)]


def make_noise(size_bytes: int) -> Bytes:
    """Aligned memory of random bytes, to put blocks from."""
    memory = aligned_buffer(size_bytes)
    memory[:] = np.frombuffer(np.random.default_rng(0).bytes(size_bytes), np.uint8)
    return memory


def _rows(size: int) -> Bytes:
    """Memory for gets, whose pages are there."""
    memory = aligned_buffer(max(MEMORY_BYTES // size, 1) * size)
    memory[:] = 0
    rows: Bytes = memory.reshape(-1, size)
    return rows
