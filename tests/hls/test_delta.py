"""The delta's packer in HLS, and the update kernels with it, against the model, to the byte."""

import ctypes

import numpy as np
import pytest

from nearflash.abi.delta import longest_delta_bytes
from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import AdamStep, LionStep
from nearflash.abi.topk import ValueFormat
from nearflash.device.backends.model.update import ModelDevice
from nearflash.device.selftest.update import UpdateVector, differing_words, random_state, run_update
from nearflash.model.gradients.delta import delta_of
from nearflash.sim.hls.build import build_shim, shim
from nearflash.sim.hls.device import HlsDevice


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


@pytest.fixture(scope="module", params=["update-tiny-delta", "update-smartssd-delta"])
def device(request):
    """Ports of one word of a delta, and of eight, of which the header shares four with the first tile."""
    with HlsDevice.open(request.param) as device:
        yield device


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "density"),
    [
        pytest.param(AdamStep(lr=1e-5, step=4, weight_decay=0.01), None, id="adam"),
        pytest.param(LionStep(lr=1e-2, step=2), 0.05, id="lion-topk"),
    ],
)
@pytest.mark.parametrize("params", [1, 2, 9, 4096, 4097, 12_001])
@pytest.mark.parametrize("copy", [CopyFormat.BF16, CopyFormat.FP16])
def test_the_update_kernel_writes_the_models_delta(device, rule, density, params, copy):
    """Deltas that end within the first port word, and of several tiles; after it, what lay there."""
    case = UpdateVector(rule, params, copy, in_place=True, delta=True, density=density)
    state = random_state(np.random.default_rng(params), params)
    state[1, ::71] = np.nan
    results, counters = run_update(device, case, state)
    with ModelDevice(device.identity.config) as model:
        expected, counted = run_update(model, case, state)
    assert differing_words(results, expected)[1] == 0
    assert {name: counters[name] for name in counted} == counted


@pytest.mark.full
def test_bytes_behind_the_delta_stay(device):
    case = UpdateVector(AdamStep(lr=1e-5, step=4), 5, CopyFormat.BF16, delta=True)
    state = random_state(np.random.default_rng(0), 5)
    device.memory.storage[:] = 0xA5
    delta = run_update(device, case, state)[0]["copy"]
    text = device.memory.storage.tobytes()
    at = text.index(delta)
    assert set(text[at + len(delta) : at + 4096]) == {0xA5}


def test_a_build_without_deltas_has_no_such_kernel():
    case, state = (
        UpdateVector(AdamStep(lr=1e-5, step=4), 64, CopyFormat.BF16, delta=True),
        np.zeros((4, 64), np.float32),
    )
    with (
        HlsDevice.open("update-tiny") as device,
        pytest.raises(CommandError, match="delta must be False on update-tin"),
    ):
        run_update(device, case, state)
