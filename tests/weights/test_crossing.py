"""What crosses a link of a compressed tensor, and its expansion behind it: the bits of the host's."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nearflash.abi.bitmap import ElementFormat
from nearflash.abi.errors import StreamError, WeightsError
from nearflash.weights.compress import compress_bytes, compress_tensor
from nearflash.weights.crossing import (
    check_stored,
    crosses_as_stored,
    crossing_bytes,
    expand_far,
    expand_groups_in_torch,
    table_bytes,
)
from nearflash.weights.expand import expand_packed
from nearflash.weights.file import PackedTensor, read_file, write_file
from nearflash.weights.groups import expand_groups, pack_groups
from nearflash.weights.pack import pack
from nearflash.weights.quantize import quantize

FORMS = {"bitmap": ("bitmap", 16), "coded-bitmap": ("coded-bitmap", 16), "int8": ("groups", 8), "int4": ("groups", 4),
         "bitmap4": ("bitmap", 4), "coded": ("coded", 16)}  # fmt: skip


def random_matrix(shape=(96, 64), dtype=np.uint16):
    """Half of it zero; patterns of bf16, or fp16 values."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape, generator=generator)
    values[values.abs() < 0.67] = 0
    if dtype is np.float16:
        return values.half().numpy()
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.fixture
def stored(tmp_path):
    """Writes a matrix in a form, or as it is packed; its packed tensor and the file's."""

    def store(form, values=None):
        packed = form if values is None else compress_tensor("w", values, *form)
        path = tmp_path / "model.safetensors"
        path.unlink(missing_ok=True)
        write_file(path, {"w": (packed.dtype, packed.shape)}, [packed])
        return packed, read_file(path)["w"]

    return store


@pytest.mark.parametrize("dtype", [np.uint16, np.float16])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_far_side_expands_the_hosts_bits(stored, form, dtype, gpu):
    packed, tensor = stored(form, random_matrix(dtype=dtype))
    assert packed.form != "dense" and crosses_as_stored(tensor)
    data = tensor.read()
    checked = check_stored(tensor, data)
    assert crossing_bytes(tensor) == len(data) + checked.table.nbytes == len(data) + table_bytes(tensor)
    out = torch.empty(tensor.shape, dtype=torch.float16 if dtype is np.float16 else torch.bfloat16, device=gpu)
    expand_far(checked, torch.tensor(data, device=gpu), torch.tensor(checked.table, device=gpu), out)
    np.testing.assert_array_equal(out.view(torch.int16).cpu().numpy().view(np.uint16), expand_packed(packed))


def test_a_gpus_kernel_takes_an_even_place_in_a_buffer(stored, gpu):
    """As tensors lie in a layer's, where their file has them so."""
    pytest.importorskip("triton")
    from nearflash.weights.gpu_kernels import expand_rows

    packed, tensor = stored(FORMS["coded-bitmap"], random_matrix())
    checked = check_stored(tensor, tensor.read())
    memory = torch.full((len(packed.data) + 66,), 0xFF, dtype=torch.uint8, device=gpu)
    memory[66:] = torch.tensor(packed.data, device=gpu)
    found = expand_rows(memory[66:], torch.tensor(checked.table, device=gpu), checked.header).cpu()
    np.testing.assert_array_equal(
        found.view(torch.int16).view(tensor.shape).numpy().view(np.uint16), expand_packed(packed)
    )


def test_what_has_no_expander_there_crosses_dense(stored):
    values = torch.randn((128, 512), generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    packed, tensor = stored(compress_bytes("w", "F8_E4M3", values.shape, values.view(torch.uint8).numpy().ravel()))
    assert packed.form == "rans" and not crosses_as_stored(tensor)
    assert crossing_bytes(tensor) == tensor.dense_bytes > tensor.stored_bytes


def test_words_that_lie_at_odd_places_cross_dense(stored):
    _, tensor = stored(FORMS["coded"], random_matrix())
    assert not crosses_as_stored(replace(tensor, offset=tensor.offset + 2))
    assert crosses_as_stored(replace(stored(FORMS["bitmap"], random_matrix())[1], offset=tensor.offset + 2))


@pytest.mark.parametrize("form", ["bitmap", "coded"])
def test_damage_is_found_before_it_crosses(stored, form):
    _, tensor = stored(FORMS[form], random_matrix())
    data = tensor.read().copy()
    data[len(data) // 2] ^= 1
    with pytest.raises(WeightsError, match="'w'"):
        check_stored(tensor, data)


def test_a_bitmap_has_as_many_rows_as_it_was_packed_with(tmp_path):
    """Not those of its shape, which others may fold otherwise; a header that is none is an error."""
    data = np.frombuffer(pack(random_matrix((96, 64))), np.uint8)
    path = tmp_path / "model.safetensors"
    write_file(path, {"w": ("BF16", (24, 256))}, [PackedTensor("w", "BF16", (24, 256), "bitmap", data)])
    tensor = read_file(path)["w"]
    assert table_bytes(tensor) == 96 * 32 == check_stored(tensor, tensor.read()).table.nbytes
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(8))
    with pytest.raises(WeightsError, match="'w'"):
        table_bytes(read_file(path)["w"])


@pytest.mark.parametrize("output", [ElementFormat.FP16, ElementFormat.BF16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(5, 64), (3, 130), (2, 65)])
def test_torch_expands_groups_as_the_loops_do(output, bits, shape, monkeypatch):
    """Scales of every kind, and parts of a few rows."""
    monkeypatch.setattr("nearflash.weights.crossing._AT_ONCE", 2 * shape[1])
    values = random_matrix(shape, np.float16 if output is ElementFormat.FP16 else np.uint16)
    data = np.frombuffer(pack_groups(quantize(values, bits, present=np.ones(shape, bool))), np.uint8).copy()
    scales = data[: shape[0] * -(-shape[1] // 64) * 4].view(np.uint16)
    scales[:4] = [0x0001, 0xFFFF, 0x7C00, 0x7F80]
    expected, found = np.empty(shape, np.uint16), torch.empty(shape, dtype=torch.int16)
    expand_groups(data, expected, bits, output)
    expand_groups_in_torch(torch.from_numpy(data), found, bits, output)
    np.testing.assert_array_equal(found.numpy().view(np.uint16), expected)
    with pytest.raises(StreamError, match=f"must have {len(data)} bytes"):
        expand_groups_in_torch(torch.from_numpy(data[:-1]), found, bits, output)
