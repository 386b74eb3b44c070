"""Bench `expand`: the expanders in cycle-accurate simulation, at every density, against the model bit for bit.

Parts are the expanders `bitmap` and `topk`, to which words come and from which beats go in every cycle, and `kernel`,
with memory behind its ports. `beats_per_cycle` is that of the second half of a long run: the cycles of the whole less
those of a run of its first half, so that filling does not count. `cycles_per_element` of a kernel is of the whole run,
from start to the last write response.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import product
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import expand_config
from nearflash.abi.topk import TILE_PARAMS, ValueFormat
from nearflash.bench.options import Option, check_choices
from nearflash.device.drivers.expand import expand_matrix
from nearflash.device.selftest.expand import MATRIX_FORMATS, MatrixFormat, format_name, random_matrix
from nearflash.gateware.gradients.topk import TopKExpander
from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.model.gradients import topk
from nearflash.model.weights.bitmap import expand, expand_row
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.fixtures.gradients import random_stream

__all__ = ["run"]

CLOCK_GHZ = 0.3
_PARTS = ("bitmap", "topk", "kernel")
BITMAPS = ((8, ElementFormat.FP16), (16, ElementFormat.FP16), (32, ElementFormat.FP16), (32, ElementFormat.INT8))
"""Width and format."""
KERNELS = {"expand-tiny": 1024, "expand-smartssd": 4096}
"""Build, and columns of a row."""
KERNEL_DENSITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
TOPK_WIDTH = 4
TOPK_DENSITIES = {
    ValueFormat.FP16: (0.0, 0.001, 0.01, 0.1, 0.25, 0.33, 0.4, 0.49, 0.75, 1.0),
    ValueFormat.FP32: (0.01, 0.25, 0.33, 0.5, 1.0),
}
"""A word a cycle is two pairs of 16-bit values, 4/3 of 32-bit ones: beyond 1/2 and 1/3 the input is the bound."""


class _Ran(NamedTuple):
    cycles: int
    beats: int
    mismatches: int
    compressed_bytes: int


def run(
    parts: Annotated[Collection[str], Option("Measure these parts.", many=True, choices=_PARTS)] = _PARTS,
    beats: Annotated[int, Option("Beats of each row of the bitmap part.", int)] = 16_384,
    seed: Annotated[int, Option("Seed of the random matrices.", int)] = 1,
) -> Iterator[dict[str, Any]]:
    """One row a format, width and density. Raises CommandError for a part that does not exist."""
    kinds: dict[str, Callable[[int, int], Iterator[dict[str, Any]]]] = {
        "bitmap": _bitmaps,
        "topk": _topk,
        "kernel": _kernels,
    }
    for part in check_choices("parts", parts, kinds):
        yield from kinds[part](beats, seed)


def _bitmaps(beats: int, seed: int) -> Iterator[dict[str, Any]]:
    for width, element in BITMAPS:
        number = element.number_format
        unit = StreamUnit(BitmapExpander(width, number.bits), f"expand-bitmap-{width}-{number.bits}")
        for sixteenths in range(17):
            row = _row(np.random.default_rng(seed), beats * width, sixteenths / 16, number.bytes)
            halves = [_expand_row(unit, row[: length * width], width) for length in (beats // 2, beats)]
            yield _result(f"bitmap-{number.name}", width, sixteenths / 16, number.bytes, *halves)


def _row(rng: np.random.Generator, columns: int, density: float, element_bytes: int) -> NDArray[Any]:
    dtype = np.dtype(f"<u{element_bytes}")
    values = rng.integers(1, 1 << 8 * element_bytes, columns, dtype)
    return np.where(rng.random(columns) < density, values, dtype.type(0))


def _expand_row(unit: StreamUnit, row: NDArray[Any], width: int) -> _Ran:
    present = row != 0
    bitmap, values = np.packbits(present, bitorder="little"), row[present]
    beats = _columns(bitmap.tobytes(), width // 8).view(f"<u{width // 8}").reshape(-1).astype(np.uint64)
    beats[-1] |= np.uint64(1 << width)
    words = _columns(values.tobytes(), width * row.itemsize)
    packed = words.view("<u8").reshape(-1) if words.shape[1] == 8 else words.view("<u4")
    found = unit.run({"i_bitmap": beats, "i_value": packed}, {"o": len(beats)}, quiet_cycles=1)["o"]
    expected = expand_row(bitmap.tobytes(), values.tobytes(), len(row), row.dtype)
    data = np.ascontiguousarray(found).view(np.uint8).reshape(len(beats), -1)[:, : width * row.itemsize]
    differs = data != expected.view(np.uint8).reshape(len(beats), -1)
    return _Ran(unit.cycles, len(beats), int(np.count_nonzero(differs)), bitmap.nbytes + values.nbytes)


def _columns(data: bytes, size: int) -> NDArray[np.uint8]:
    """Rows of `size` bytes; the last one is filled up with zeros."""
    return np.frombuffer(data.ljust(-(-len(data) // size) * size, b"\0"), np.uint8).reshape(-1, size)


def _topk(beats: int, seed: int) -> Iterator[dict[str, Any]]:
    unit = StreamUnit(TopKExpander(TOPK_WIDTH), f"expand-topk-{TOPK_WIDTH}")
    tiles = max(2, beats * TOPK_WIDTH // TILE_PARAMS)
    for value_format, densities in TOPK_DENSITIES.items():
        for density in densities:
            halves = [
                _expand_stream(unit, seed, count * TILE_PARAMS, density, value_format) for count in (tiles // 2, tiles)
            ]
            name = f"topk-{value_format.number_format.name}"
            yield _result(name, TOPK_WIDTH, density, FP32.bytes, *halves)


def _expand_stream(unit: StreamUnit, seed: int, params: int, density: float, value_format: ValueFormat) -> _Ran:
    stream = random_stream(np.random.default_rng(seed), params, density, value_format)
    command, words = params | len(stream) << 32, np.frombuffer(stream, "<u8")
    beats = params // TOPK_WIDTH
    found = unit.run({"i_command": [command], "i": words}, {"o": beats}, quiet_cycles=1)["o"]
    expected = topk.expand(stream, params).view(np.uint32).reshape(beats, TOPK_WIDTH)
    mismatches = int(np.count_nonzero(found[:, :TOPK_WIDTH] != expected))
    return _Ran(unit.cycles, beats, mismatches, len(stream))


def _kernels(beats: int, seed: int) -> Iterator[dict[str, Any]]:
    for name, columns in KERNELS.items():
        build = expand_config(name)
        with VerilatorDevice(build, memory_bytes=1 << 26) as device:
            rows = max(2, beats * build.width // columns)
            for form, density in product(MATRIX_FORMATS, KERNEL_DENSITIES):
                half, whole = (_expand_matrix(device, seed, (n, columns), density, form) for n in (rows // 2, rows))
                kind, dense = f"kernel-{format_name(form).replace(' ', '-')}", (form[2] or form[0]).number_format
                result = _result(kind, build.width, density, dense.bytes, half, whole)
                yield result | {"config": name, "cycles_per_element": whole.cycles / (rows * columns)}


def _expand_matrix(
    device: VerilatorDevice, seed: int, shape: tuple[int, int], density: float, form: MatrixFormat
) -> _Ran:
    stream = random_matrix(np.random.default_rng(seed), shape, density, form, group_rows=16)
    done = expand_matrix(device, stream)
    mismatches = int(np.count_nonzero(done.dense != expand(stream)))
    width = expand_config(device.identity.config.full_name).width
    return _Ran(done.counters["cycles"], shape[0] * shape[1] // width, mismatches, len(stream))


def _result(form: str, width: int, density: float, element_bytes: int, half: _Ran, whole: _Ran) -> dict[str, Any]:
    rate = (whole.beats - half.beats) / (whole.cycles - half.cycles)
    return {
        "format": form,
        "density": density,
        "width": width,
        "beats_per_cycle": rate,
        "mismatches": half.mismatches + whole.mismatches,
        "output_gbps_300mhz": rate * width * element_bytes * CLOCK_GHZ,
        "input_bytes_per_element": whole.compressed_bytes / (whole.beats * width),
        "of": "beats of the second half of a run / cycles; output in 10^9 bytes/s at 300 MHz",
        "unit": "beats per cycle",
    }
