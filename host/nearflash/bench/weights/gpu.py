"""GB/s of dense output when compressed matrices expand on a GPU, beside a copy of the dense bytes in its memory.

Matrices are larger than a GPU's caches, of normal numbers, half of them pruned by magnitude. Streams are there already.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader
from nearflash.bench.weights.forward import MEDIAN_MAGNITUDE
from nearflash.bench.weights.sizes import DTYPE_NAMES, FORMATS, settings_of
from nearflash.device.backends.host.matrix import expand_into
from nearflash.weights import compress_tensor
from nearflash.weights.pretrained import DTYPES

__all__ = ["measure"]

_SIDE = 8192
_REPEATS = 20


def measure(side: int = _SIDE) -> Iterator[dict[str, Any]]:
    """A row for each format with a bitmap and dtype; without a GPU one with the key `skipped`."""
    if not torch.cuda.is_available():
        yield {"skipped": "torch finds no GPU"}
        return
    weights = torch.randn(side, side, generator=torch.Generator().manual_seed(1))
    weights[weights.abs() < MEDIAN_MAGNITUDE] = 0
    for dtype in DTYPE_NAMES:
        words = weights.to(DTYPES[dtype]).view(torch.int16)
        array = words.numpy().view(np.float16 if dtype == "fp16" else np.uint16)
        source, target = words.cuda(), torch.empty_like(words, device="cuda")
        copied = _seconds(partial(target.copy_, source))
        for format in (name for name in FORMATS if "bitmap" in name):
            data = compress_tensor("weight", array, **settings_of(format)).data
            spent, out = _expansion(data)
            want = np.empty((len(out), out.nbytes // len(out)), np.uint8)
            expand_into(data, want)
            yield {
                "format": format,
                "dtype": dtype,
                "gpu": torch.cuda.get_device_name(),
                "stored_bytes": len(data),
                "mismatches": int((out.view(torch.uint8).cpu().numpy() != want).sum()),
                "expand_gbps": [out.nbytes / seconds / 1e9 for seconds in _three(spent)],
                "copy_gbps": [source.nbytes / seconds / 1e9 for seconds in _three(copied)],
                "fraction_of_copy": statistics.median(copied) / statistics.median(spent),
                "unit": "10^9 bytes of dense output a second: median, least, most",
                "of": "a plain copy in the GPU's memory, bytes that it writes",
            }


def _expansion(data: Any) -> tuple[list[float], Any]:
    from nearflash.weights.gpu import on_gpu
    from nearflash.weights.gpu_kernels import expand_rows

    header = BitmapHeader.unpack(data[:HEADER_BYTES].tobytes(), len(data))
    stream, starts = on_gpu(data, "cuda")
    out = expand_rows(stream, starts, header)
    return _seconds(lambda: expand_rows(stream, starts, header, out)), out


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
