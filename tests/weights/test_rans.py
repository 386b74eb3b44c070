"""rANS-coded bytes: packed, and expanded by the model and by the host's loops."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("accelerate")

import torch
from safetensors.torch import save_file

from nearflash.abi.bitmap import HEADER_BYTES, pack_group_end
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import ShapeError, StreamError
from nearflash.abi.rans import MOST_SLOTS, TABLE_BYTES, RansHeader
from nearflash.cli.main import main
from nearflash.model.weights.rans import expand_rans as expand_by_model
from nearflash.weights import expand, open_checkpoint
from nearflash.weights.compress import compress_bytes
from nearflash.weights.rans import expand_rans, pack_rans
from nearflash.weights.sources import read_dense

RNG = np.random.default_rng(8)


def draw(count, dtype=torch.float8_e4m3fn):
    """Gaussian weights in fp8, the largest at the top of its range, as bytes."""
    values = torch.from_numpy(RNG.standard_normal(count).astype(np.float32))
    return (values * (torch.finfo(dtype).max / values.abs().max())).to(dtype).view(torch.uint8).numpy()


def expand_bytes(stream, count):
    out = np.zeros(count, np.uint8)
    expand_rans(np.frombuffer(stream, np.uint8), out)
    return out


@pytest.mark.parametrize("count", [1, 31, 32, 33, 700])
def test_bytes_come_back_by_model_and_host(count):
    cases = draw(count), np.zeros(count, np.uint8), RNG.integers(0, 256, count).astype(np.uint8)
    for values in cases:
        stream = pack_rans(values, block_elements=300)
        np.testing.assert_array_equal(expand_bytes(stream, count), values)
        np.testing.assert_array_equal(expand_by_model(stream), values)


def test_many_groups_and_threads_give_the_same():
    values = draw(6_000_001)
    np.testing.assert_array_equal(expand(pack_rans(values)), values)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_are_near_the_entropy(dtype):
    values = draw(1 << 20, dtype)
    shares = np.bincount(values, minlength=256) / values.size
    entropy = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum() / 8
    assert entropy < len(pack_rans(values)) / values.size < entropy + 0.0025
    pruned = np.where(RNG.random(values.size) < 0.9, 0, values)
    assert len(pack_rans(pruned)) / values.size < 0.25  # a bit for each zero, no less


@pytest.mark.parametrize("at", [3, 70, 700, 2000, -60])
def test_a_damaged_byte_is_found(at):
    stream = bytearray(pack_rans(draw(20_000), block_elements=1000))
    stream[at] ^= 16
    for read in (lambda data: expand_bytes(data, 20_000), expand_by_model):
        with pytest.raises(StreamError, match="rANS-coded weights must"):
            read(bytes(stream))


def test_a_stream_that_ends_early_is_found():
    stream = pack_rans(draw(20_000))
    for size in (10, 64, 300, 10_000, len(stream) - 64):
        with pytest.raises(StreamError, match="rANS-coded weights must"):
            expand_bytes(stream[:size], 20_000)


def forge(change):
    """A stream of 5,000 elements changed under a checksum that holds, but for those of the groups' ends."""
    stream = bytearray(pack_rans(draw(5000)))
    change(stream)
    body = bytes(stream[HEADER_BYTES:-64])
    return bytes(stream[:-64]) + pack_group_end(0, crc32c(body), len(body))


@pytest.mark.parametrize("at", [0, TABLE_BYTES, TABLE_BYTES + 10, TABLE_BYTES + 400])
def test_forged_frequencies_words_and_states_are_found(at):
    def change(stream):
        stream[HEADER_BYTES + at] ^= 1

    for read in (lambda data: expand_bytes(data, 5000), expand_by_model):
        with pytest.raises(StreamError, match="frequencies or states that do not fit in block 0"):
            read(forge(change))


def test_a_group_of_more_blocks_than_there_are_ends_with_the_last_one():
    """The reference counted them to the end, up to 2^32."""
    stream = pack_rans(draw(500), block_elements=300)
    header = replace(RansHeader.unpack(stream[:HEADER_BYTES], len(stream)), group_blocks=(1 << 32) - 1)
    long = header.pack() + stream[HEADER_BYTES:]
    np.testing.assert_array_equal(expand_by_model(long), expand(stream))
    np.testing.assert_array_equal(expand(long), expand(stream))


def test_a_value_with_too_many_slots_is_found():
    def change(stream):
        table = np.zeros(256, "<u2")
        table[:3] = MOST_SLOTS + 1, MOST_SLOTS, 1
        stream[HEADER_BYTES : HEADER_BYTES + TABLE_BYTES] = table.tobytes()

    for read in (lambda data: expand_bytes(data, 5000), expand_by_model):
        with pytest.raises(StreamError, match="do not fit in block 0"):
            read(forge(change))


def test_what_cannot_be_made_smaller_stays_dense_and_nothing_is_refused():
    noise = RNG.integers(0, 256, (64, 64)).astype(np.uint8)
    assert compress_bytes("a", "F8_E4M3", (64, 64), noise.ravel()).form == "dense"
    with pytest.raises(ShapeError, match="must be 1 at least"):
        pack_rans(np.empty(0, np.uint8))


def test_a_quantised_checkpoint_keeps_every_bit(tmp_path, capsys):
    """fp8 with scales beside it, as checkpoints of DeepSeek (blocks) and of compressed-tensors (rows) have them."""
    config = {"model_type": "llama", "torch_dtype": "bfloat16",
              "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}  # fmt: skip
    weights = {
        "a.weight": torch.from_numpy(draw(256 * 384)).view(torch.float8_e4m3fn).view(256, 384),
        "a.weight_scale_inv": torch.rand(2, 3),
        "b.weight": torch.from_numpy(draw(256 * 384, torch.float8_e5m2)).view(torch.float8_e5m2).view(256, 384),
        "b.weight_scale": torch.rand(256, 1).bfloat16(),
        "embed.weight": torch.randn(512, 64).bfloat16(),
    }
    (tmp_path / "big").mkdir()
    (tmp_path / "big/config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "big/model.safetensors")
    assert main(["compress", str(tmp_path / "big"), "--lossless", "-o", str(tmp_path / "small")]) == 0
    found = open_checkpoint(tmp_path / "small")
    assert found["a.weight"].form == found["b.weight"].form == "rans" and found["embed.weight"].form == "coded"
    for name, weight in weights.items():
        dense = read_dense(found[name])
        assert dense.dtype == weight.dtype and torch.equal(dense.view(torch.uint8), weight.view(torch.uint8))
    out = torch.empty(256, 384, dtype=torch.float8_e4m3fn)
    assert torch.equal(expand(found["a.weight"], out=out).view(torch.uint8), weights["a.weight"].view(torch.uint8))
    assert "of the model in dense fp8" in capsys.readouterr().out
    options = ["--lossless", "--texts", __file__, "-o", str(tmp_path / "other")]
    assert main(["compress", str(tmp_path / "big"), *options]) == 2
    assert "texts must be left out where weights are quantised (fp8)" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
