"""The delta against a plain comparison in NumPy, for the model and the host's compiled pass alike."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from nearflash.abi.crc import crc32c
from nearflash.abi.delta import DeltaHeader, longest_delta_bytes, tile_bytes
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import HEADER_BYTES, StreamFault, ValueFormat, tile_crc_prefix
from nearflash.device.backends.host import delta as host
from nearflash.model.gradients.delta import apply_delta, changes_of, delta_of, merge_deltas

FORMATS = {ValueFormat.BF16: np.uint16, ValueFormat.FP32: np.uint32}


def random_words(rng, params, value_format):
    dtype = FORMATS[value_format]
    return rng.integers(0, np.iinfo(dtype).max + 1, params, dtype=dtype)


def changed(rng, words, share):
    """Words of which about `share` have one bit flipped."""
    flips = np.where(rng.random(words.size) < share, 1 << rng.integers(0, 16, words.size), 0)
    return words ^ flips.astype(words.dtype)


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("params", [1, 31, 4096, 4097, 9001])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.24, 0.26, 1.0])
def test_a_delta_is_what_numpy_finds_and_the_host_writes_the_same_bytes(value_format, params, share):
    rng = np.random.default_rng(params)
    old = random_words(rng, params, value_format)
    new = changed(rng, old, share)
    delta = delta_of(old.tolist(), new.tolist(), value_format)
    assert apply_delta(delta, old.tolist()) == new.tolist()
    differ = set(np.flatnonzero(old != new).tolist())
    found = changes_of(delta)
    assert differ <= found.keys() and all(new[i] == word for i, word in found.items())
    tiles = np.arange(params) // 4096
    dense = np.bincount(tiles[old != new], minlength=tiles[-1] + 1) * 4 > np.bincount(tiles)
    assert found.keys() == differ | set(np.flatnonzero(dense[tiles]).tolist())
    mine = host.delta_of(old, new, value_format)
    assert mine.tobytes() == delta and mine.size <= longest_delta_bytes(params, old.itemsize)
    changes = host.changes_of(mine)
    assert dict(zip(changes.indices.tolist(), changes.words.tolist(), strict=True)) == found


def test_bytes_of_a_small_delta():
    """Written out by hand: two changes in one tile, and a dense tile of one parameter."""
    old, new = [7] * 4097, [7] * 4097
    new[1], new[4095], new[4096] = 0x3C00, 0xC000, 0x1234
    delta = delta_of(old, new, ValueFormat.BF16)
    assert delta[:8] == b"NFDL" + bytes([1, 0, 2, 12])
    assert delta[HEADER_BYTES : HEADER_BYTES + 4] == bytes([2, 0, 0, 0])
    assert delta[HEADER_BYTES + 8 : HEADER_BYTES + 24].hex() == "0100ff0f00000000" + "003c00c000000000"
    assert delta[HEADER_BYTES + 24 : HEADER_BYTES + 28] == bytes([1, 0, 1, 0])
    assert delta[HEADER_BYTES + 32 :].hex() == "3412000000000000"


def test_steps_merge_with_the_last_value():
    rng = np.random.default_rng(5)
    versions = [random_words(rng, 5000, ValueFormat.BF16)]
    for share in (0.01, 0.4, 0.003, 0.02):
        versions.append(changed(rng, versions[-1], share))
    deltas = [host.delta_of(a, b, ValueFormat.BF16) for a, b in pairwise(versions)]
    merged = host.merge_changes([host.changes_of(delta) for delta in deltas])
    assert dict(zip(merged.indices.tolist(), merged.words.tolist(), strict=True)) == merge_deltas(
        [delta.tobytes() for delta in deltas]
    )
    words = versions[0].copy()
    words[merged.indices] = merged.words
    np.testing.assert_array_equal(words, versions[-1])


@pytest.mark.parametrize("at", [0, 8, 20, 30, HEADER_BYTES, HEADER_BYTES + 2, HEADER_BYTES + 5, HEADER_BYTES + 9, -1])
def test_a_damaged_delta_is_refused(at):
    rng = np.random.default_rng(at + 1)
    old = random_words(rng, 6000, ValueFormat.BF16)
    good = host.delta_of(old, changed(rng, old, 0.01), ValueFormat.BF16)
    bad = good.copy()
    bad[at] ^= 0x41
    for wrong in (bad, good[:-8], good[: HEADER_BYTES - 1]):
        with pytest.raises(StreamError, match="a delta must be as its header"):
            changes_of(wrong.tobytes())
        with pytest.raises(StreamError, match="a delta must be as its header"):
            host.changes_of(wrong.copy())


def reseal(delta):
    """Make the first tile's checksum, and the header's, those of what it holds by now."""
    heads, at, header = [], HEADER_BYTES, DeltaHeader.unpack(delta[:HEADER_BYTES].tobytes(), delta.size)
    for tile in range(-(-header.params // 4096)):
        count, flags = delta[at : at + 4].view("<u2").tolist()
        end = at + tile_bytes(min(count, 4096), 2, dense=bool(flags))
        prefix = tile_crc_prefix(tile, delta[at : at + 8].tobytes())
        delta[at + 4 : at + 8] = np.frombuffer(
            crc32c(prefix + delta[at + 8 : end].tobytes()).to_bytes(4, "little"), np.uint8
        )
        heads.append(delta[at : at + 8].tobytes())
        at = end
    sealed = replace(header, tiles_crc32c=crc32c(b"".join(heads)))
    delta[:HEADER_BYTES] = np.frombuffer(sealed.pack(), np.uint8)


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [
        (HEADER_BYTES, 5000, StreamFault.COUNT),
        (HEADER_BYTES + 2, 1, StreamFault.COUNT),
        (HEADER_BYTES + 2, 2, StreamFault.COUNT),
        (HEADER_BYTES, 3000, StreamFault.LENGTH),
        (HEADER_BYTES + 8, 4095, StreamFault.ORDER),
        (-16, 905, StreamFault.RANGE),
    ],
)
def test_each_fault_has_its_name(at, value, fault):
    old = np.zeros(4096 + 904, np.uint16)
    new = old.copy()
    new[[3, 90, 4000, 4096 + 903]] = 9
    delta = host.delta_of(old, new, ValueFormat.BF16)
    delta[at:][:2].view("<u2")[0] = value
    if fault in (StreamFault.ORDER, StreamFault.RANGE):
        reseal(delta)
    for read in (host.changes_of, lambda given: changes_of(given.tobytes())):
        with pytest.raises(StreamError) as found:
            read(delta.copy())
        assert found.value.fault == fault


def test_more_words_than_the_header_states_are_refused():
    """Nothing is written past the room for the stated ones."""
    new = np.arange(4096, dtype=np.uint16)
    delta = host.delta_of(np.zeros_like(new), new, ValueFormat.BF16)
    stated = replace(DeltaHeader.unpack(delta[:HEADER_BYTES].tobytes(), delta.size), words=7)
    delta[:HEADER_BYTES] = np.frombuffer(stated.pack(), np.uint8)
    with pytest.raises(StreamError, match="4096 words in"):
        host.changes_of(delta)


def test_tiles_of_another_delta_are_refused():
    rng = np.random.default_rng(8)
    old = random_words(rng, 4096, ValueFormat.BF16)
    one, other = old.copy(), old.copy()
    one[5] ^= 1
    other[9] ^= 1
    first, second = (host.delta_of(old, new, ValueFormat.BF16) for new in (one, other))
    mixed = np.concatenate([first[:HEADER_BYTES], second[HEADER_BYTES:]])
    with pytest.raises(StreamError, match="tiles of another"):
        host.changes_of(mixed)
    with pytest.raises(StreamError, match="tiles of another"):
        changes_of(mixed.tobytes())


def test_a_delta_fits_words_of_its_number_only():
    delta = delta_of([1, 2], [1, 3], ValueFormat.BF16)
    with pytest.raises(StreamError, match="2 parameters for 3"):
        apply_delta(delta, [1, 2, 3])
