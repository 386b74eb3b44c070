import pytest

from nearflash.abi.delta import DeltaHeader, delta_error, is_dense, longest_delta_bytes, tile_bytes
from nearflash.abi.errors import CommandError, StreamError
from nearflash.abi.topk import HEADER_BYTES, StreamFault, StreamHeader, ValueFormat

HEADER = DeltaHeader(ValueFormat.BF16, 4097, 3, 72, 0x12345678)


def test_a_header_comes_back():
    text = HEADER.pack()
    assert len(text) == HEADER_BYTES and text[:4] == b"NFDL"
    assert DeltaHeader.unpack(text, 72) == HEADER


def test_gradients_and_deltas_are_not_mistaken_for_each_other():
    gradient = StreamHeader(ValueFormat.BF16, 4097, 3, 72).pack()
    with pytest.raises(StreamError, match="magic b'NFTK'") as found:
        DeltaHeader.unpack(gradient, 72)
    assert found.value.fault == StreamFault.HEADER
    with pytest.raises(StreamError, match="magic b'NFDL'"):
        StreamHeader.unpack(HEADER.pack(), 4097, 72)


@pytest.mark.parametrize("at", range(4, HEADER_BYTES))
def test_every_byte_of_a_header_counts(at):
    text = bytearray(HEADER.pack())
    text[at] ^= 1
    with pytest.raises(StreamError, match="a delta must be"):
        DeltaHeader.unpack(bytes(text), 72)


@pytest.mark.parametrize(("cut", "size"), [(31, 72), (32, 71), (32, 80), (32, 0)])
def test_lengths_are_compared(cut, size):
    with pytest.raises(StreamError) as found:
        DeltaHeader.unpack(HEADER.pack()[:cut], size)
    assert found.value.fault == StreamFault.LENGTH


@pytest.mark.parametrize(("params", "size"), [(0, 72), (1 << 32, 72), (1, 1 << 32)])
def test_what_no_header_can_state_is_refused(params, size):
    with pytest.raises(CommandError, match="split the range"):
        DeltaHeader(ValueFormat.BF16, params, 0, size, 0)


def test_a_tile_is_dense_above_a_quarter():
    assert [is_dense(changed, 4096) for changed in (0, 1024, 1025, 4096)] == [False, False, True, True]
    assert [is_dense(changed, 1) for changed in (0, 1)] == [False, True]


@pytest.mark.parametrize("value_bytes", [2, 4])
@pytest.mark.parametrize("params", [1, 4095, 4096, 8193])
def test_no_tile_is_longer_than_a_dense_one(params, value_bytes):
    sizes = [min(4096, params - first) for first in range(0, params, 4096)]
    longest = sum(
        max(
            tile_bytes(size if is_dense(changed, size) else changed, value_bytes, dense=is_dense(changed, size))
            for changed in range(size + 1)
        )
        for size in sizes
    )
    assert HEADER_BYTES + longest <= longest_delta_bytes(params, value_bytes) <= HEADER_BYTES + longest + 8


def test_an_error_names_its_fault():
    error = delta_error(StreamFault.RANGE, "index 9")
    assert error.fault == StreamFault.RANGE and "not with index 9" in str(error) and "publish it again" in str(error)
