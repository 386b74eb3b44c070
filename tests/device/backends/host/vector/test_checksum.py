"""CRC32C in native loops, by the processor's instruction and by a table, is the library's."""

import numpy as np
import pytest

pytest.importorskip("crc32c")

from crc32c import crc32c

from nearflash.device.backends.host.vector.rows import load_bitmap_loops


@pytest.mark.parametrize("name", ["crc32c", "crc32c_by_table"])
def test_equals_the_library(name):
    compiled = getattr(load_bitmap_loops(), name)
    data = np.random.default_rng(6).integers(0, 256, 60_000, dtype=np.uint8)
    long = (3 * 8192 - 8, 3 * 8192, 3 * 8192 + 3 * 256 + 16, 59_904)
    for size in (0, 8, 64, 504, 512, 520, 3 * 256 - 8, 3 * 256, 3 * 256 + 8, 1032, *long):
        for start in (0, 1, 64):
            assert int(compiled(data.ctypes.data + start, size)) == crc32c(data[start : start + size])
