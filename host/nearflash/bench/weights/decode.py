"""GB/s of dense output when tensors that are in memory are expanded: by one core, and by all that this process has.

Beside it, of the same tensors and in the same run: a plain copy of the dense bytes, zstd, and the disk's reads. `one
core`: every thread of the process is bound to one; the rest by as many threads as there are cores, a tensor each, as a
loading model has it.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader
from nearflash.bench.weights.sizes import SizesSettings, loaded, settings_of
from nearflash.device.backends.host.matrix import expand_into
from nearflash.storage.io.bandwidth import Probe
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.weights import compress_tensor
from nearflash.weights.convert import linear_weights
from nearflash.weights.expand import ELEMENTS
from nearflash.weights.file import PackedTensor
from nearflash.weights.groups import expand_groups
from nearflash.weights.pretrained import DTYPES
from nearflash.weights.prune import prune

__all__ = ["bound_to", "disk_rate", "measure"]

_REPEATS = 7
_PROBE_BYTES = 512 << 20
_ZSTD_LEVEL = 3


@dataclass
class _Tensor:
    """A tensor, and memory for it."""

    dense: NDArray[np.uint8]
    out: NDArray[np.uint8]
    expand: Callable[[NDArray[np.uint8]], None]
    """Write it there."""
    stored_bytes: int
    lossless: bool = True


def measure(name: str, settings: SizesSettings) -> Iterator[dict[str, Any]]:
    """A row for each format and dtype of a model's linear weights, half of them pruned by magnitude (int8, int4: none).

    Raises MissingModelError.
    """
    model, _ = loaded(name)
    model.requires_grad_(False)
    names = linear_weights(model)
    beside = {"disk_read_gbps": disk_rate(settings.path)}
    whole = {each: model.get_parameter(each).clone() for each in names}
    for _ in prune(model, None, method="magnitude"):
        pass
    pruned = {each: model.get_parameter(each) for each in names}
    for dtype in settings.dtypes:
        arrays = {
            source: [_array(weight, dtype) for weight in weights.values()]
            for source, weights in (("none", whole), ("magnitude", pruned))
        }
        peers: list[tuple[str, str, list[_Tensor]]] = [
            ("copy", "magnitude", [_copied(each) for each in arrays["magnitude"]])
        ]
        if find_spec("zstandard"):
            peers.append((f"zstd-{_ZSTD_LEVEL}", "magnitude", [_zstd(each) for each in arrays["magnitude"]]))
        for format in settings.formats:
            source = "none" if format.startswith("int") else "magnitude"
            peers.append((format, source, [_packed(each, format) for each in arrays[source]]))
        for format, source, tensors in peers:
            yield {"pruning": source, "format": format, "dtype": dtype, **_rates(tensors), **beside}


def disk_rate(path: Path) -> float:
    """GB/s of large direct reads on the disk of a folder: median of five."""
    with Probe(path, _PROBE_BYTES) as probe:
        probe.write(probe.size_bytes)
        return probe.size_bytes / statistics.median(probe.read(probe.size_bytes) for _ in range(5)) / 1e9


@contextmanager
def bound_to(cores: Iterable[int]) -> Iterator[None]:
    """Every thread of this process, and those that they begin, runs on these cores alone."""
    before = os.sched_getaffinity(0)
    try:
        _bind(set(cores))
        yield
    finally:
        _bind(before)


def _bind(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile


def _rates(tensors: list[_Tensor]) -> dict[str, Any]:
    dense = sum(each.dense.nbytes for each in tensors)
    cores = sorted(os.sched_getaffinity(0))

    def run(each: _Tensor) -> None:
        each.expand(each.out)

    def run_all() -> None:
        for each in tensors:
            run(each)

    run_all()
    wrong = sum(each.lossless and not np.array_equal(each.out, each.dense) for each in tensors)
    with bound_to(cores[:1]):
        one = [_timed(run_all) for _ in range(_REPEATS)]
    with ThreadPoolExecutor(len(cores), initializer=set_ieee_arithmetic) as pool:
        every = [_timed(lambda: list(pool.map(run, tensors))) for _ in range(_REPEATS)]
    return {
        "bytes_fraction": sum(each.stored_bytes for each in tensors) / dense,
        "of": "dense 16-bit bytes",
        "mismatches": wrong,
        "decode_gbps_per_core": dense / statistics.median(one) / 1e9,
        "decode_gbps_per_core_range": [dense / max(one) / 1e9, dense / min(one) / 1e9],
        "cores": len(cores),
        "decode_gbps_of_all_cores": dense / statistics.median(every) / 1e9,
        "unit": "10^9 bytes of dense output a second",
    }


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _array(weight: Any, dtype: str) -> NDArray[Any]:
    from torch import int16

    words: NDArray[Any] = weight.to(DTYPES[dtype]).view(int16).numpy()
    return words.view(np.float16 if dtype == "fp16" else np.uint16)


def _new(values: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    dense = values.reshape(-1).view(np.uint8)
    return dense, np.zeros_like(dense)


def _copied(values: NDArray[Any]) -> _Tensor:
    dense, out = _new(values)
    return _Tensor(dense, out, lambda to: np.copyto(to, dense), dense.nbytes)


def _zstd(values: NDArray[Any]) -> _Tensor:
    import zstandard

    dense, out = _new(values)
    packed, codec = zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(dense.tobytes()), zstandard.ZstdDecompressor()

    def expand(to: NDArray[np.uint8]) -> None:
        to[:] = np.frombuffer(codec.decompress(packed), np.uint8)

    return _Tensor(dense, out, expand, len(packed))


def _packed(values: NDArray[Any], format: str) -> _Tensor:
    dense, out = _new(values)
    settings = settings_of(format)
    packed = compress_tensor("weight", values, **settings)
    return _Tensor(dense, out, _expander(packed), len(packed.data), settings["bits"] == 16)


def _expander(packed: PackedTensor) -> Callable[[NDArray[np.uint8]], None]:
    data = packed.data
    if packed.form == "dense":
        return lambda to: np.copyto(to, data)
    if packed.form == "bitmap":
        header = BitmapHeader.unpack(data[:HEADER_BYTES].tobytes(), len(data))
        return lambda to: expand_into(data, to.reshape(header.rows, -1))  # type: ignore[return-value]
    bits, output, columns = int(packed.form.removeprefix("int")), ELEMENTS[packed.dtype], packed.shape[-1]
    return lambda to: expand_groups(data, to.view(np.uint16).reshape(-1, columns), bits, output)
