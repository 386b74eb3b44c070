"""GB/s of dense output when compressed matrices expand on a GPU, beside a copy of the dense bytes in its memory.

Matrices are larger than a GPU's caches, of normal numbers, half of them pruned by magnitude, or none. Streams are there
already.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES
from nearflash.bench.weights.forward import MEDIAN_MAGNITUDE
from nearflash.bench.weights.sizes import DTYPE_NAMES, FORMATS, settings_of
from nearflash.device.drivers.expand import stream_header
from nearflash.weights import compress_tensor, expand
from nearflash.weights.pretrained import DTYPES

__all__ = ["measure"]

_SIDE = 8192
_REPEATS = 20


def measure(side: int = _SIDE) -> Iterator[dict[str, Any]]:
    """A row for each format that a GPU expands, and dtype; without a GPU one with the key `skipped`."""
    if not torch.cuda.is_available():
        yield {"skipped": "torch finds no GPU"}
        return
    normal = torch.randn(side, side, generator=torch.Generator().manual_seed(1))
    pruned = normal.where(normal.abs() >= MEDIAN_MAGNITUDE, 0)
    cases = [("magnitude", name) for name in FORMATS if "bitmap" in name or name == "coded"] + [("none", "coded")]
    for dtype in DTYPE_NAMES:
        for pruning, format in cases:
            words = (normal if pruning == "none" else pruned).to(DTYPES[dtype]).view(torch.int16)
            array = words.numpy().view(np.float16 if dtype == "fp16" else np.uint16)
            source = words.cuda()
            copied = _seconds(partial(torch.empty_like(source).copy_, source))
            data = compress_tensor("weight", array, **settings_of(format)).data
            spent, out = _expansion(data, array.shape)
            want = expand(data.tobytes()).view(np.uint8).reshape(-1)
            yield {
                "format": format,
                "dtype": dtype,
                "pruning": pruning,
                "gpu": torch.cuda.get_device_name(),
                "stored_bytes": len(data),
                "mismatches": int((out.view(torch.uint8).cpu().numpy().reshape(-1) != want).sum()),
                "expand_gbps": [out.nbytes / seconds / 1e9 for seconds in _three(spent)],
                "copy_gbps": [source.nbytes / seconds / 1e9 for seconds in _three(copied)],
                "fraction_of_copy": statistics.median(copied) / statistics.median(spent),
                "unit": "10^9 bytes of dense output a second: median, least, most",
                "of": "a plain copy in the GPU's memory, bytes that it writes",
            }


def _expansion(data: NDArray[np.uint8], shape: tuple[int, ...]) -> tuple[list[float], Any]:
    """Seconds of each expansion of a stream of the GPU's memory, and what came of it."""
    from nearflash.weights.gpu import expand_on_gpu, on_gpu

    header = stream_header(data[:HEADER_BYTES].tobytes(), len(data))
    stream, table = on_gpu(data, header, "cuda")
    out = expand_on_gpu(stream, table, header, shape)
    return _seconds(lambda: expand_on_gpu(stream, table, header, shape, out)), out


def _seconds(work: Callable[[], object]) -> list[float]:
    """Seconds of each of the repeats, by the GPU's own clock; the first ones are not counted."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS + 3)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events[3:]]


def _three(seconds: list[float]) -> tuple[float, float, float]:
    return statistics.median(seconds), max(seconds), min(seconds)
