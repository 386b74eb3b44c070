import numpy as np
import pytest

from nearflash.gateware.coding.crc import Crc32c
from nearflash.model.coding.crc import crc32c


@pytest.mark.parametrize("width_bytes", [8, 64])
def test_equals_model(clocked, width_bytes):
    """One message behind the other, with random gaps between beats."""
    rng = np.random.default_rng(1)
    rows, expected = [], []
    for length in (1, 2, 23, 23, 3, 12):
        message = rng.integers(0, 256, width_bytes * length, np.uint8)
        for beat, word in enumerate(message.reshape(-1, width_bytes)):
            gap = {"enable": 0, "first": int(rng.integers(2)), "data": int(rng.integers(1 << 62))}
            data = int.from_bytes(word.tobytes(), "little")
            rows += [gap] * int(rng.integers(2)) + [{"enable": 1, "first": int(beat == 0), "data": data}]
            expected.append(crc32c(message[: width_bytes * (beat + 1)]))
    found = clocked(Crc32c(8 * width_bytes), rows)
    assert [value for row, value in zip(rows, found, strict=True) if row["enable"]] == expected
