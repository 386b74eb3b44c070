"""Expansion on a GPU, or under Triton's interpreter on the CPU: the bits of the host's."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from nearflash.abi.bitmap import BitmapHeader, Coding, ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.abi.errors import FormatError, ShapeError, StreamError
from nearflash.device.backends.host.coded import expand_coded
from nearflash.device.selftest.expand import CODED_FORMATS, MATRIX_FORMATS, levels_name, random_coded, random_matrix
from nearflash.model.weights.bitmap import expand
from nearflash.model.weights.levels import expand_levels
from nearflash.weights import expand as expand_weights
from nearflash.weights import gpu as gpu_weights
from nearflash.weights import gpu_coded, pack, pack_coded, pack_rans, read_file, write_file
from nearflash.weights.compress import compress_tensor

SHAPES = [(1, 1), (3, 63), (2, 65), (5, 513), (2, 2100)]
each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))


@pytest.fixture
def expanded(gpu):
    def expand(stream, out=None):
        """Bit patterns of the dense matrix."""
        data = np.frombuffer(stream, np.uint8).copy()
        header = BitmapHeader.unpack(stream[:64], len(stream))
        dense = gpu_weights.expand_stream(data, header, (header.rows, header.columns), out, gpu)
        return dense.view(torch.int8).cpu().numpy().view(f"<u{dense.itemsize}")

    return expand


@pytest.fixture
def expanded_levels(gpu):
    def expand(stream):
        """Bit patterns of coded weights."""
        header = CodedHeader.unpack(stream[:64], len(stream))
        dense = gpu_weights.expand_stream(np.frombuffer(stream, np.uint8), header, (header.elements,), None, gpu)
        return dense.view(torch.int16).cpu().numpy().view(np.uint16)

    return expand


@each_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_equals_the_model(expanded, form, shape, density):
    stream = random_matrix(np.random.default_rng(1), shape, density, form, 2)
    np.testing.assert_array_equal(expanded(stream), expand(stream))


@pytest.mark.parametrize("scale", [0x0001, 0x7F00, 0x7F80, 0x7C01, 0xFFFF])
@pytest.mark.parametrize("output", [ElementFormat.FP16, ElementFormat.BF16])
def test_scales_of_every_kind(expanded, scale, output):
    from nearflash.model.weights.bitmap import pack_scaled
    from nearflash.model.weights.dequantize import ScaledMatrix

    rng = np.random.default_rng(2)
    scales = np.array([[[scale, rng.integers(1 << 16)] for _ in range(3)]], np.uint16)
    codes = rng.integers(0, 256, (1, 140)).astype(np.uint8)
    matrix = ScaledMatrix(codes, rng.random((1, 140)) < 0.7, scales, ElementFormat.INT8, output)
    stream = pack_scaled(matrix, 1)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        np.testing.assert_array_equal(expanded(stream), expand(stream))


def test_writing_into_memory_of_the_callers(expanded, gpu):
    matrix = np.random.default_rng(1).normal(size=(4, 100)).astype(np.float16)
    matrix[np.abs(matrix) < 0.6] = 0
    stream = pack(matrix)
    out = torch.empty(4, 100, dtype=torch.float16, device=gpu)
    expanded(stream, out)
    assert (out.cpu().numpy() == matrix).all()
    with pytest.raises(ShapeError, match=r"out must be contiguous and have the shape \(4, 100\), not \(100, 4\)"):
        expanded(stream, out.T)
    with pytest.raises(FormatError, match=r"out must be of torch.float16, not torch.bfloat16"):
        expanded(stream, out.to(torch.bfloat16))


def test_a_stream_on_the_way_to_the_gpu_is_checked_on_the_host(gpu):
    matrix = np.where(np.random.default_rng(1).random((6, 200)) < 0.5, 1, 0).astype(np.int8)
    stream = np.frombuffer(pack(matrix), np.uint8).copy()
    header = BitmapHeader.unpack(stream[:64].tobytes(), len(stream))
    dense = gpu_weights.expand_stream(stream, header, (3, 400), None, gpu)
    assert (dense.cpu().numpy().reshape(6, 200) == matrix).all()
    bytes_of = np.frombuffer(stream.tobytes(), np.uint8)  # read-only: torch warned of it
    assert torch.equal(gpu_weights.expand_stream(bytes_of, header, (3, 400), None, gpu), dense)
    stream[100] ^= 1
    with pytest.raises(ValueError, match="a bitmap matrix must"):
        gpu_weights.expand_stream(stream, header, (3, 400), None, gpu)
    dense = gpu_weights.to_gpu(matrix.view(np.uint8).view(np.uint16), "BF16", None, gpu)
    assert dense.dtype == torch.bfloat16
    with pytest.raises(FormatError, match=r"out must be of torch.bfloat16, not torch.int8"):
        gpu_weights.to_gpu(matrix.view(np.uint16), "BF16", torch.empty(6, 100, dtype=torch.int8, device=gpu), "cpu")


def test_coded_rows_find_the_codebook_of_their_group(expanded):
    rng = np.random.default_rng(3)
    matrix = (rng.normal(size=(9, 80)) * 2.0 ** -np.arange(9)[:, None]).astype(np.float16)
    for group_rows in (1, 2, 16):
        stream = pack(matrix, coding="exponents", group_rows=group_rows)
        assert BitmapHeader.unpack(stream[:64], len(stream)).coding is Coding.EXPONENTS
        np.testing.assert_array_equal(expanded(stream).view(np.float16), matrix)


each_coded_format = pytest.mark.parametrize("form", CODED_FORMATS, ids=levels_name)


@each_coded_format
@pytest.mark.parametrize(("elements", "block"), [(1, 300), (65, 64), (150, 100)])
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
def test_coded_weights_equal_the_model(expanded_levels, monkeypatch, form, elements, block, density):
    """Of segments of two tiles, the last of them with a part of one."""
    monkeypatch.setattr(gpu_coded, "_SEGMENT", 64)
    monkeypatch.setattr(gpu_coded, "_TILE", 32)
    stream = random_coded(np.random.default_rng(4), elements, density, form, block)
    np.testing.assert_array_equal(expanded_levels(stream), expand_levels(stream))


def test_more_fields_before_a_segment_than_are_counted_at_once(expanded_levels, monkeypatch):
    for name in ("_SEGMENT", "_TILE"):
        monkeypatch.setattr(gpu_coded, name, 1 << 15)
    stream = random_coded(np.random.default_rng(5), 40_000, 0.9, (ElementFormat.BF16, 2, True), 40_000)
    np.testing.assert_array_equal(expanded_levels(stream), expand_levels(stream))


@pytest.mark.full
@pytest.mark.parametrize("density", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_blocks_as_the_packer_writes_them(expanded_levels, density, dtype):
    values = np.random.default_rng(6).normal(0, 0.02, 70_000).astype(np.float32)
    values[np.random.default_rng(7).random(values.size) >= density] = 0
    words = values.astype(np.float16) if dtype == np.float16 else (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(expanded_levels(pack_coded(words)), words.view(np.uint16))


def test_damaged_coded_weights_are_refused_as_by_the_host(expanded_levels):
    rng = np.random.default_rng(8)
    good = random_coded(rng, 400, 0.5, (ElementFormat.FP16, 2, True), 300, 1)
    faults = [_fault(expanded_levels, good[:-64])]
    for place in rng.integers(128, len(good), 12).tolist():
        data = bytearray(good)
        data[place] ^= 1 << place % 8
        faults.append(_fault(expand_on_host, bytes(data)))
        assert _fault(expanded_levels, bytes(data)) == faults[-1]
    assert len(set(faults)) > 3


def expand_on_host(stream):
    expand_coded(np.frombuffer(stream, np.uint8), np.empty(400, np.uint16))


def _fault(expand, stream):
    """What the error states; "" for a bit that nothing reads, behind a group's end."""
    try:
        expand(stream)
    except StreamError as error:
        return str(error)
    return ""


def test_expand_takes_what_is_stored_to_the_gpu(tmp_path, gpu, monkeypatch):
    """Streams and tensors of files, of every coding, to new memory and to the caller's."""
    monkeypatch.setattr(sys.modules["nearflash.weights.expand"], "_on_gpu", lambda out, device: True)
    values = np.random.default_rng(9).normal(0, 0.02, (10, 300)).astype(np.float16)
    bits = torch.from_numpy(values)
    packed = compress_tensor("a", values, "coded")
    write_file(tmp_path / "file", {"a": (packed.dtype, packed.shape)}, [packed])
    tensor = read_file(tmp_path / "file")["a"]
    assert tensor.form == "coded" and torch.equal(expand_weights(tensor, gpu).cpu(), bits)
    out = torch.empty(3000, dtype=torch.float16, device=gpu)
    assert expand_weights(pack_coded(values), gpu, out=out) is out
    assert torch.equal(out.cpu(), bits.flatten())
    with pytest.raises(ShapeError, match=r"out must be contiguous and have the shape \(3000,\), not \(10, 300\)"):
        expand_weights(pack_coded(values), gpu, out=out.view(10, 300))
    with pytest.raises(FormatError, match=r"out must be of torch.float16, not torch.bfloat16"):
        expand_weights(pack_coded(values), gpu, out=out.to(torch.bfloat16))
    codes = values.view(np.uint8).ravel()
    assert (expand_weights(pack_rans(codes), gpu).cpu().numpy() == codes).all()


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nearflash.weights import gpu_coded, gpu_kernels

def check(kernel, sizes, words, table, out):
    kinds = {"bytes_at": "*u8", "words_at": words, table: "*i64", "out": out}
    kinds = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in kernel.arg_names}
    made = compile(ASTSource(kernel, kinds, sizes), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "cubin" in made.asm, made.asm.keys()
    assert ".local" not in made.asm["ptx"], "registers are spilled"

for form in range(6):
    sizes = {"FORM": form, "BF16": form == 3, "TILE": 2048}
    check(gpu_kernels._expand, sizes, "*i16", "starts", "*i8" if form == 1 else "*i16")
for form in range(8):
    sizes = {"FP16": form < 4, "BITS": 1 + form % 2, "BITMAP": form // 2 % 2 == 1, "SEGMENT": 8192, "TILE": 2048}
    check(gpu_coded._expand, sizes, "*i32", "table", "*i16")
"""


@pytest.mark.full
def test_the_kernels_compile_for_a_gpu(tmp_path):
    """Without one: the interpreter takes what the compiler does not, as annotations of arguments."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", COMPILED], env=given | {"TRITON_CACHE_DIR": str(tmp_path)}, check=True, timeout=300
    )
