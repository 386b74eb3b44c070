import numpy as np

from nearflash.gateware.nfc.crc import Crc32c
from nearflash.model.nfc.crc import crc32c


def test_equals_model(clocked):
    """One message behind the other, with random gaps between beats."""
    rng = np.random.default_rng(1)
    rows, expected = [], []
    for length in (1, 2, 67, 67, 3, 40):
        message = rng.integers(0, 256, 8 * length, np.uint8)
        for beat, word in enumerate(message.view("<u8")):
            gap = {"enable": 0, "first": int(rng.integers(2)), "data": int(rng.integers(1 << 62))}
            rows += [gap] * int(rng.integers(2)) + [{"enable": 1, "first": int(beat == 0), "data": int(word)}]
            expected.append(crc32c(message[: 8 * beat + 8]))
    found = clocked(Crc32c(), rows)
    assert [value for row, value in zip(rows, found, strict=True) if row["enable"]] == expected
