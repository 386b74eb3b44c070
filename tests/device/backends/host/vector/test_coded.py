"""Loops over coded weights: the same elements on every kind of processor."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.bitmap import HEADER_BYTES
from nearflash.abi.coded import CodedHeader
from nearflash.device.backends.host.coded import expand_coded
from nearflash.device.backends.host.vector import coded
from nearflash.support import native
from nearflash.weights import pack_coded

GENERIC = native.ProcessorLevel("generic", ("-O1",), frozenset())
"""Of no processor's own instructions."""
RNG = np.random.default_rng(7)
SPREADS = {1: 0.2, 2: 3.0}
"""Of the exponents that first codes of so many bits are the best for."""


@pytest.fixture(scope="module", params=[*native.TARGETS, GENERIC], ids=lambda target: target.name)
def loops(request):
    if not request.param.features <= native._features():
        pytest.skip("this processor is another")
    source = Path(coded.__file__).with_name("coded.cpp")
    return ctypes.CDLL(str(native.compile_source(source, request.param)))


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
@pytest.mark.parametrize("code_bits", [1, 2])
@pytest.mark.parametrize("has_bitmap", [False, True])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 4_099])
def test_elements_come_back(loops, monkeypatch, dtype, code_bits, has_bitmap, count):
    exponents = np.clip(np.rint(RNG.normal(15, SPREADS[code_bits], count)), 1, 30).astype(np.uint16)
    mantissa = 10 if dtype is np.float16 else 7
    words = exponents << mantissa | RNG.integers(0, 1 << mantissa, count, np.uint16) | RNG.integers(2) << 15
    words = np.where(RNG.random(count) < (0.5 if has_bitmap else 0), 0, words).astype(np.uint16)
    stream = pack_coded(words.view(dtype), block_elements=1000)
    header = CodedHeader.unpack(stream[:HEADER_BYTES], len(stream))
    assert count < 1000 or (header.code_bits, header.has_bitmap) == (code_bits, has_bitmap)
    monkeypatch.setattr(coded, "load_coded_loops", lambda: loops)
    out = np.zeros(count, np.uint16)
    expand_coded(np.frombuffer(stream, np.uint8), out)
    np.testing.assert_array_equal(out, words)
