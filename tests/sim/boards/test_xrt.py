"""The stand-in for XRT fails as the runtime does, so that a driver that passes on it is not spared."""

import ctypes
import errno

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.device.backends.xrt.functions import FUNCTIONS, NORMAL, P2P, TO_DEVICE

xrt = pytest.importorskip("nearflash.sim.boards.xrt")


@pytest.fixture
def runtime():
    card = xrt.SimulatedCard(CONFIGS["update-tiny"], "shell")
    made = xrt.XrtRuntime({"0000:01:00.1": card}, {"a.xclbin": "shell", "b.xclbin": "other"})
    yield made
    if card.kernel:
        card.kernel.close()


@pytest.fixture
def opened(runtime):
    """Handles of a device whose xclbin is loaded."""
    device, image = runtime.xrtDeviceOpenByBDF(b"0000:01:00.1"), runtime.xrtXclbinAllocFilename(b"a.xclbin")
    assert runtime.xrtDeviceLoadXclbinHandle(device, image) == 0
    return device


def number(call, *arguments):
    """What a call returns, and errno after it."""
    ctypes.set_errno(0)
    return call(*arguments), ctypes.get_errno()


def test_every_function_of_the_list_is_a_c_function_with_its_types(runtime):
    for name, (result, *arguments) in FUNCTIONS.items():
        function = getattr(runtime, name)
        assert function.restype is result and list(function.argtypes) == arguments
    with pytest.raises(ctypes.ArgumentError):
        runtime.xrtDeviceOpenByBDF(1.5)


def test_what_does_not_exist(runtime):
    assert number(runtime.xrtDeviceOpenByBDF, b"0000:02:00.1") == (None, 0)
    assert number(runtime.xrtXclbinAllocFilename, b"c.xclbin") == (None, errno.ENOENT)


def test_another_shells_xclbin_is_not_loaded(runtime):
    device, image = runtime.xrtDeviceOpenByBDF(b"0000:01:00.1"), runtime.xrtXclbinAllocFilename(b"b.xclbin")
    assert runtime.xrtDeviceLoadXclbinHandle(device, image) == -errno.EOPNOTSUPP
    assert runtime.cards["0000:01:00.1"].kernel is None


def test_a_context_is_exclusive(runtime, opened):
    uuid = ctypes.create_string_buffer(16)
    kernel = runtime.xrtPLKernelOpenExclusive(opened, uuid, b"update")
    assert kernel and number(runtime.xrtPLKernelOpenExclusive, opened, uuid, b"update") == (None, errno.EBUSY)
    assert number(runtime.xrtPLKernelOpenExclusive, opened, uuid, b"attend") == (None, errno.EINVAL)
    runtime.xrtKernelClose(kernel)
    assert runtime.xrtPLKernelOpenExclusive(opened, uuid, b"update")


def test_a_p2p_buffer_is_the_memory_and_is_not_synced(runtime, opened):
    handle = runtime.xrtBOAlloc(opened, 4096, P2P, 0)
    memory = runtime.cards["0000:01:00.1"].kernel.view(runtime.xrtBOAddress(handle), 4096)
    ctypes.memset(runtime.xrtBOMap(handle), 9, 4096)
    assert (memory == 9).all() and runtime.xrtBOSync(handle, TO_DEVICE, 4096, 0) == -errno.EOPNOTSUPP


def test_a_normal_buffer_is_a_copy_until_it_is_synced(runtime, opened):
    handle = runtime.xrtBOAlloc(opened, 4096, NORMAL, 0)
    memory = runtime.cards["0000:01:00.1"].kernel.view(runtime.xrtBOAddress(handle), 4096)
    ctypes.memset(runtime.xrtBOMap(handle), 9, 4096)
    assert not memory.any()
    assert runtime.xrtBOSync(handle, TO_DEVICE, 10, 5) == 0
    assert memory.sum() == 90 and memory[5:15].all()


def test_failures_that_are_asked_for(runtime):
    runtime.cards["0000:01:00.1"].refuses = {"xrtDeviceClose": errno.EBUSY, "xrtBOAddress": errno.EIO}
    assert number(runtime.xrtDeviceClose, 1) == (-1, errno.EBUSY)
    assert number(runtime.xrtBOAddress, 1) == ((1 << 64) - 1, errno.EIO)
    assert runtime.calls == ["xrtDeviceClose", "xrtBOAddress"]
