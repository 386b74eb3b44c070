import numpy as np

from nearflash.abi.crc import crc32c
from nearflash.device.crc import crc32c_of_words


def test_messages_of_all_lengths_with_another_first_word():
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 40, 1500)
    counts[:2] = 1, 700
    starts = np.cumsum(counts) - counts
    words = rng.integers(0, 1 << 64, counts.sum(), dtype=np.uint64)
    first = rng.integers(0, 1 << 64, len(counts), dtype=np.uint64)
    expected = [
        crc32c(head.tobytes() + words[start + 1 : start + count].tobytes())
        for head, start, count in zip(first, starts, counts, strict=True)
    ]
    assert crc32c_of_words(words, starts, counts, first).tolist() == expected


def test_no_message():
    none = np.zeros(0, np.int64)
    assert len(crc32c_of_words(none.view(np.uint64), none, none, none.view(np.uint64))) == 0
