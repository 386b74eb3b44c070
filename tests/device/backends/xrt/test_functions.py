"""The list of XRT's functions that the driver calls, and errors of theirs."""

import ast
import ctypes
import errno
from pathlib import Path

import pytest

from nearflash.abi.errors import DeviceError, UnknownDeviceError
from nearflash.device.backends.xrt import functions
from nearflash.device.backends.xrt.functions import FUNCTIONS, XrtFunctions, load_library
from nearflash.device.backends.xrt.memory import XrtMemory

FOLDER = Path(functions.__file__).parent


def called(source):
    """Names of the runtime's functions in a module: the texts that begin like one."""
    return {
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(("xrt", "xcl"))
        if node.value.isidentifier() and node.value != "xrt"
    }


def test_the_driver_calls_what_the_list_has_and_nothing_else():
    """What is not on the list has no types, so that ctypes would pass wrong ones."""
    names = set().union(*(called(path.read_text()) for path in FOLDER.glob("*.py") if path.name != "functions.py"))
    assert names == set(FUNCTIONS)
    assert called('call("xrtBOCopy", 1)') == {"xrtBOCopy"}
    for path in FOLDER.glob("*.py"):
        users = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not {name for name in users if name.startswith("xrt")}, f"{path} goes past the list"


def test_a_library_that_lacks_a_function():
    class Old:
        def __getattr__(self, name):
            if name == "xrtBOMap":
                raise AttributeError(name)
            return ctypes.CFUNCTYPE(ctypes.c_int)(int)

    with pytest.raises(UnknownDeviceError, match="needs the function xrtBOMap of the Xilinx Runtime: install"):
        XrtFunctions(Old())


def test_a_machine_without_the_runtime(monkeypatch):
    monkeypatch.setattr(functions, "LIBRARIES", ("libnearflash_none.so.2",))
    with pytest.raises(UnknownDeviceError, match=r"needs libnearflash_none.so.2 of the Xilinx Runtime.*libxrt-alveo2"):
        load_library()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("number", [errno.ENODEV, errno.EPERM, errno.ENOSPC, errno.EINVAL, 1000])
def test_returned_numbers_are_explained(machine, card, number, sign):
    call = XrtFunctions(machine)
    monkey = ctypes.CFUNCTYPE(*FUNCTIONS["xrtBOFree"], use_errno=True)(lambda handle: sign * number)
    call._functions["xrtBOFree"] = monkey
    with pytest.raises(DeviceError, match=r"XRT must free it, not fail in xrtBOFree \(.*: \w.* \w") as error:
        call.call("xrtBOFree", 1, to="free it")
    # One and minus one are no number: the libraries use them for errors that have none.
    assert f"errno {number})" in str(error.value) or number == 1


def test_without_a_number_the_runtimes_message_is_named(machine):
    with pytest.raises(DeviceError, match=r"xrtDeviceOpenByBDF \(no error number\): see the runtime's message above"):
        XrtFunctions(machine).call("xrtDeviceOpenByBDF", b"0000:01:00.1", to="open card")


def test_group_numbers_are_no_errors(machine):
    call = XrtFunctions(machine)
    call._functions["xrtKernelArgGroupId"] = ctypes.CFUNCTYPE(*FUNCTIONS["xrtKernelArgGroupId"])(lambda k, n: n)
    assert call.call("xrtKernelArgGroupId", 1, 3, to="find it") == 3
    with pytest.raises(DeviceError):
        call.call("xrtKernelArgGroupId", 1, -2, to="find it")


def test_memory_has_windows_only_where_a_page_of_one_can_be_had(machine, card):
    class Card:
        functions = XrtFunctions(machine)
        device = 1

    machine.handles[1] = card
    machine._xrtDeviceLoadXclbinHandle(1, machine._new(card.platform))
    assert XrtMemory(Card(), 0, p2p=True).p2p and not XrtMemory(Card(), 0, p2p=False).p2p
    card.p2p = False
    assert not XrtMemory(Card(), 0, p2p=True).p2p
