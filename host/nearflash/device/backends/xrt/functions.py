"""The functions of the Xilinx Runtime that the driver calls, and nothing else of it.

They are those of XRT's C interface in libxrt_coreutil. Its Python module, pyxrt, has no access to a kernel's registers
(2.25 binds neither `xrt::ip` nor `xrt::kernel::read_register`); the C interface has, in every release from 2.8 on.

Source: XRT 2.25, xrt/xrt_device.h, xrt/xrt_kernel.h, xrt/xrt_bo.h, xrt/experimental/xrt_xclbin.h.
"""

import ctypes
import errno
import os
from typing import Any

from nearflash.abi.errors import DeviceError, UnknownDeviceError

__all__ = ["FROM_DEVICE", "FUNCTIONS", "NORMAL", "P2P", "TO_DEVICE", "UUID_BYTES", "XrtFunctions", "load_library"]

NORMAL, P2P = 0, 1 << 30
"""Flags of buffer objects (XRT_BO_FLAGS_…)."""
TO_DEVICE, FROM_DEVICE = 0, 1
"""Directions (xclBOSyncDirection)."""
UUID_BYTES = 16
NO_ADDRESS = (1 << 64) - 1

_handle, _int, _text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
_u32, _u64, _size = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t

#: By name: the type of the result, then those of the arguments.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "xrtDeviceOpenByBDF": (_handle, _text),
    "xrtDeviceClose": (_int, _handle),
    "xrtXclbinAllocFilename": (_handle, _text),
    "xrtXclbinFreeHandle": (_int, _handle),
    "xrtXclbinGetXSAName": (_int, _handle, _handle, _int, ctypes.POINTER(_int)),
    "xrtXclbinGetUUID": (_int, _handle, _handle),
    "xrtDeviceLoadXclbinHandle": (_int, _handle, _handle),
    "xrtPLKernelOpenExclusive": (_handle, _handle, _handle, _text),
    "xrtKernelClose": (_int, _handle),
    "xrtKernelArgGroupId": (_int, _handle, _int),
    "xrtKernelReadRegister": (_int, _handle, _u32, ctypes.POINTER(_u32)),
    "xrtKernelWriteRegister": (_int, _handle, _u32, _u32),
    "xrtBOAlloc": (_handle, _handle, _size, _u64, _u32),
    "xrtBOFree": (_int, _handle),
    "xrtBOMap": (_handle, _handle),
    "xrtBOAddress": (_u64, _handle),
    "xrtBOSync": (_int, _handle, _int, _size, _size),
}
LIBRARIES = ("libxrt_coreutil.so.2", "/opt/xilinx/xrt/lib/libxrt_coreutil.so.2")
_DENIED = "this user may not use the card: join the group that owns its file in /dev/dri (usually `render`)"
_FULL = "the memory is full: free buffers first; with P2P, see the window's size in `xbutil examine -r pcie-info`"
_ADVICE = {
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EBUSY: "another process has the card or the kernel: end it (`xbutil examine -r dynamic-regions` shows it)",
    errno.EOPNOTSUPP: "the xclbin is for another platform than the card has: link it for that of `xbutil examine`",
    errno.ENODEV: "the card is gone: see `xbutil examine`",
    errno.ENOENT: "there is no such file or card: see `xbutil examine`",
    errno.ENOMEM: _FULL,
    errno.ENOSPC: _FULL,
    errno.EINVAL: "the runtime found nothing of that name or number: see its message above",
}


def load_library() -> Any:
    """The runtime's library. Raises UnknownDeviceError that names what to install."""
    failures = []
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name, use_errno=True)
        except OSError as error:
            failures.append(str(error))
    raise UnknownDeviceError(
        f"device 'xrt' needs {LIBRARIES[0]} of the Xilinx Runtime, 2.8 or later; install AMD's package xrt "
        f"(/opt/xilinx/xrt), or Debian's libxrt2 and libxrt-alveo2: {failures[0]}"
    )


class XrtFunctions:
    """The functions of a library, with their types. Raises UnknownDeviceError for one that lacks some of them."""

    def __init__(self, library: Any) -> None:
        self._functions = {}
        for name, (result, *arguments) in FUNCTIONS.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise UnknownDeviceError(
                    f"device 'xrt' needs the function {name} of the Xilinx Runtime: install release 2.8 or later"
                ) from None
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def call(self, name: str, *arguments: Any, to: str) -> Any:
        """Call a function to do `to`. Raises DeviceError with the runtime's error number and what to do about it."""
        ctypes.set_errno(0)
        result = self._functions[name](*arguments)
        kind = FUNCTIONS[name][0]
        if kind is _handle:
            failed = not result
        elif kind is _u64:
            failed = result == NO_ADDRESS
        else:
            failed = result < 0 if name == "xrtKernelArgGroupId" else result != 0
        if failed:
            # Some functions return the number, some set errno, with either sign.
            number = abs(result) if kind is _int and abs(result) > 1 else ctypes.get_errno()
            reason = f"{os.strerror(number)}, errno {number}" if number else "no error number"
            advice = _ADVICE.get(number, "see the runtime's message above and `xbutil examine`")
            raise DeviceError(f"XRT must {to}, not fail in {name} ({reason}): {advice}")
        return result
