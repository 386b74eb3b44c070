"""The delta's packer in HLS against the model, to the byte."""

import ctypes

import numpy as np
import pytest

from nearflash.abi.delta import longest_delta_bytes
from nearflash.abi.topk import ValueFormat
from nearflash.model.gradients.delta import delta_of
from nearflash.sim.hls.build import build_shim, shim


@pytest.fixture(scope="module", params=[1, 4])
def pack(request):
    defines = {"NEARFLASH_LANES": str(request.param)}
    library = ctypes.CDLL(str(build_shim(f"delta-{request.param}", shim("hls_delta.cpp"), defines=defines)))
    library.pack_delta.restype = ctypes.c_uint32

    def run(old, new, value_format):
        out = np.zeros(longest_delta_bytes(old.size, 2) // 8, np.uint64)
        places = (ctypes.c_void_p(array.ctypes.data) for array in (old, new))
        count = library.pack_delta(
            *places, ctypes.c_uint32(old.size), ctypes.c_uint32(value_format), ctypes.c_void_p(out.ctypes.data)
        )
        return out[:count].tobytes()

    return run


@pytest.mark.parametrize("value_format", [ValueFormat.BF16, ValueFormat.FP16])
@pytest.mark.parametrize("params", [1, 3, 4096, 4097, 12_001])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.24, 0.26, 1.0])
def test_a_delta_is_the_models_to_the_byte(pack, value_format, params, share):
    rng = np.random.default_rng(params)
    old = rng.integers(0, 1 << 16, params, np.uint16)
    new = old ^ np.where(rng.random(params) < share, 1 << rng.integers(0, 16, params), 0).astype(np.uint16)
    assert pack(old, new, value_format) == delta_of(old.tolist(), new.tolist(), value_format)


@pytest.mark.parametrize("changed", [1024, 1025])
def test_around_a_quarter(pack, changed):
    old = np.zeros(4096, np.uint16)
    new = old.copy()
    new[np.random.default_rng(changed).permutation(4096)[:changed]] = 0x8000  # -0 is not 0
    assert pack(old, new, ValueFormat.BF16) == delta_of(old.tolist(), new.tolist(), ValueFormat.BF16)
