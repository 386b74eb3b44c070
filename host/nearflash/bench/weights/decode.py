"""GB/s of dense output when tensors that are in memory are expanded: by one core, and by all that this process has.

Beside it, of the same tensors and in the same run: a plain copy of the dense bytes, zstd and ZipNN where they are
installed (pip install --no-deps zstandard zipnn), and the disk's reads. `one core`: every thread of the process is
bound to one; the rest by as many threads as there are cores, a tensor each, as a loading model has it.
"""

import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader
from nearflash.bench.disk import disk_rate
from nearflash.bench.stopwatch import time_call
from nearflash.bench.weights.sizes import ZSTD_LEVEL, SizesSettings, load_named, settings_of
from nearflash.device.backends.host.coded import expand_coded
from nearflash.device.backends.host.matrix import expand_into
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.weights import compress_tensor
from nearflash.weights.convert import layer_weights
from nearflash.weights.expand import ELEMENTS
from nearflash.weights.file import PackedTensor
from nearflash.weights.groups import expand_groups
from nearflash.weights.pretrained import DTYPES
from nearflash.weights.prune import prune

__all__ = ["bind_to", "measure"]

_REPEATS = 7


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
    """A row for each format and dtype of a model's linear weights: as they are, and half of them pruned by magnitude.

    Raises MissingModelError.
    """
    model, _ = load_named(name)
    model.requires_grad_(False)
    names = layer_weights(model)
    beside = {"disk_read_gbps": disk_rate(settings.path)}
    whole = {weight: model.get_parameter(weight).clone() for weight in names}
    for _ in prune(model, None, method="magnitude"):
        pass
    pruned = {weight: model.get_parameter(weight) for weight in names}
    for dtype in settings.dtypes:
        arrays = {
            source: [_array(weight, dtype) for weight in weights.values()]
            for source, weights in (("none", whole), ("magnitude", pruned))
        }
        for source, pack, format in _list_cases(settings.formats, dtype):
            tensors = [pack(array) for array in arrays[source]]
            yield {"pruning": source, "format": format, "dtype": dtype, **_rates(tensors), **beside}


def _list_cases(formats: Iterable[str], dtype: str) -> Iterator[tuple[str, Callable[[NDArray[Any]], _Tensor], str]]:
    """Cases of the bench: weights as they are or pruned, what packs them, its name; peers where they are installed."""
    peers: dict[str, Callable[[NDArray[Any]], _Tensor]] = {"copy": _copy}
    if find_spec("zstandard"):
        peers[f"zstd-{ZSTD_LEVEL}"] = _zstd
    if find_spec("zipnn"):
        peers["zipnn"] = partial(_zipnn, dtype=dtype)
    for source in ("none", "magnitude"):
        yield from ((source, pack, name) for name, pack in peers.items())
        names = (name for name in formats if name == "coded" or name.startswith("int") == (source == "none"))
        yield from ((source, partial(_pack, format=name), name) for name in names)


@contextmanager
def bind_to(cores: Iterable[int]) -> Iterator[None]:
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
    dense = sum(tensor.dense.nbytes for tensor in tensors)
    cores = sorted(os.sched_getaffinity(0))

    def run(tensor: _Tensor) -> None:
        tensor.expand(tensor.out)

    def run_all() -> None:
        for tensor in tensors:
            run(tensor)

    run_all()
    wrong = sum(tensor.lossless and not np.array_equal(tensor.out, tensor.dense) for tensor in tensors)
    with bind_to(cores[:1]):
        on_one_core = [time_call(run_all) for _ in range(_REPEATS)]
    with ThreadPoolExecutor(len(cores), initializer=set_ieee_arithmetic) as pool:
        on_all_cores = [time_call(lambda: list(pool.map(run, tensors))) for _ in range(_REPEATS)]
    return {
        "bytes_fraction": sum(tensor.stored_bytes for tensor in tensors) / dense,
        "of": "dense 16-bit bytes",
        "mismatches": wrong,
        "decode_gbps_per_core": dense / statistics.median(on_one_core) / 1e9,
        "decode_gbps_per_core_range": [dense / max(on_one_core) / 1e9, dense / min(on_one_core) / 1e9],
        "cores": len(cores),
        "decode_gbps_of_all_cores": dense / statistics.median(on_all_cores) / 1e9,
        "unit": "10^9 bytes of dense output a second",
    }


def _array(weight: Any, dtype: str) -> NDArray[Any]:
    from torch import int16

    words: NDArray[Any] = weight.to(DTYPES[dtype]).view(int16).numpy()
    return words.view(np.float16 if dtype == "fp16" else np.uint16)


def _new(values: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    dense = values.reshape(-1).view(np.uint8)
    return dense, np.zeros_like(dense)


def _copy(values: NDArray[Any]) -> _Tensor:
    dense, out = _new(values)
    return _Tensor(dense, out, lambda to: np.copyto(to, dense), dense.nbytes)


def _zstd(values: NDArray[Any]) -> _Tensor:
    import zstandard

    dense, out = _new(values)
    packed, codec = zstandard.ZstdCompressor(ZSTD_LEVEL).compress(dense.tobytes()), zstandard.ZstdDecompressor()

    def expand(to: NDArray[np.uint8]) -> None:
        to[:] = np.frombuffer(codec.decompress(packed), np.uint8)

    return _Tensor(dense, out, expand, len(packed))


def _zipnn(values: NDArray[Any], dtype: str) -> _Tensor:
    import zipnn

    dense, out = _new(values)
    codec = zipnn.ZipNN(bytearray_dtype={"bf16": "bfloat16", "fp16": "float16"}[dtype], input_format="byte")
    packed = codec.compress(bytearray(dense.tobytes()))

    def expand(to: NDArray[np.uint8]) -> None:
        to[:] = np.frombuffer(codec.decompress(packed), np.uint8)

    return _Tensor(dense, out, expand, len(packed))


def _pack(values: NDArray[Any], format: str) -> _Tensor:
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
    if packed.form == "coded":
        return lambda to: expand_coded(data, to.view(np.uint16))  # type: ignore[return-value]
    bits, output, columns = int(packed.form.removeprefix("int")), ELEMENTS[packed.dtype], packed.shape[-1]
    return lambda to: expand_groups(data, to.view(np.uint16).reshape(-1, columns), bits, output)
