"""Expansion on a GPU, or under Triton's interpreter on the CPU: the bits of the host's."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from nearflash.abi.bitmap import BitmapHeader, Coding, ElementFormat
from nearflash.abi.errors import FormatError, ShapeError
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.model.weights.bitmap import expand
from nearflash.weights import gpu as gpu_weights
from nearflash.weights import pack
from nearflash.weights.gpu_kernels import expand_rows

SHAPES = [(1, 1), (3, 63), (2, 65), (5, 513), (2, 2100)]
each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))


@pytest.fixture
def expanded(gpu):
    def expand(stream, out=None):
        """Bit patterns of the dense matrix."""
        data = np.frombuffer(stream, np.uint8).copy()
        header = BitmapHeader.unpack(stream[:64], len(stream))
        dense = expand_rows(*gpu_weights.on_gpu(data, gpu), header, out)
        return dense.view(torch.int8).cpu().numpy().view(f"<u{dense.itemsize}")

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


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nearflash.weights.gpu_kernels import _expand

for form in range(6):
    sizes = {"FORM": form, "BF16": form == 3, "TILE": 2048}
    kinds = {"bytes_at": "*u8", "words_at": "*i16", "starts": "*i64", "out": "*i8" if form == 1 else "*i16"}
    kinds = {name: "constexpr" if name in sizes else kinds.get(name, "i32") for name in _expand.arg_names}
    made = compile(ASTSource(_expand, kinds, sizes), target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "cubin" in made.asm, made.asm.keys()
    assert ".local" not in made.asm["ptx"], "registers are spilled"
"""


@pytest.mark.full
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    """Without one: the interpreter takes what the compiler does not, as annotations of arguments."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run(
        [sys.executable, "-c", COMPILED], env=given | {"TRITON_CACHE_DIR": str(tmp_path)}, check=True, timeout=300
    )
