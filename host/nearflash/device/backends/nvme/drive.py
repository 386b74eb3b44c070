"""An NVMe drive as whoever sends it commands sees it, and the drives of Linux: /dev/ng0n1.

Commands go through the generic character device of a namespace, which Linux makes for every command set, known or not.

Source: linux/nvme_ioctl.h, NVME_IOCTL_ADMIN64_CMD and NVME_IOCTL_IO64_CMD.
"""

import contextlib
import errno
import fcntl
import os
import re
import struct
from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import DeviceError, DeviceLostError, UnknownDeviceError, WaitTimeoutError
from nearflash.device.backends.nvme.entries import Statuses, SubmissionEntry, status_text

__all__ = ["CharacterDrive", "NvmeDrive", "check_status", "generic_devices"]

Bytes = NDArray[np.uint8]
_GET_NAMESPACE = 0x4E40
_ADMIN, _IO = 0xC050_4E47, 0xC050_4E48
_CALL = struct.Struct("<16s8x QII24s I4xQ")
"""struct nvme_passthru_cmd64: dwords 0 to 3, metadata, address, two lengths, dwords 10 to 15, time, result."""
_PATH = re.compile(r"/dev/ng(\d+)n\d+")
_TIMED_OUT = (Statuses.ABORTED, Statuses.ABORTED_BY_HOST)


class NvmeDrive(ABC):
    """A controller, opened by one of its namespaces."""

    namespace: int
    """Identifier of that namespace."""

    @abstractmethod
    def submit(self, entry: SubmissionEntry, data: Bytes | None = None, *, timeout_s: float = 60.0) -> int:
        """Send a command and wait for its end; dwords 0 and 1 of the completion.

        data: what is sent, or where what is received goes. Raises DeviceError,
        which names the drive's status, WaitTimeoutError, DeviceLostError.
        """

    @abstractmethod
    def close(self) -> None:
        """Release it; it may be called twice."""


def generic_devices(folder: Path = Path("/dev")) -> list[str]:
    """Paths of the generic devices of this machine's namespaces."""
    return sorted(str(path) for path in folder.glob("ng*n*"))


def check_status(entry: SubmissionEntry, status: int, timeout_s: float) -> None:
    """Raise DeviceError, or WaitTimeoutError, for a command that did not succeed."""
    name = entry.opcode.name
    if status & 0x7FF in _TIMED_OUT:
        raise WaitTimeoutError(f"{name} must end within {timeout_s:g} s, not be aborted: wait for longer")
    if status:
        raise DeviceError(f"{name} must succeed, but the drive's status is {status_text(status)}")


class CharacterDrive(NvmeDrive):
    """The drive behind a generic character device; its other namespaces are found beside it.

    Raises UnknownDeviceError where there is none, DeviceError without permission.
    """

    def __init__(self, path: str) -> None:
        match = _PATH.fullmatch(path)
        if not match or not Path(path).is_char_device():
            there = ", ".join(generic_devices()) or "none here"
            raise UnknownDeviceError(f"an NVMe namespace must be named by its generic device ({there}), not {path!r}")
        self._files: dict[int, int] = {}
        self.namespace = self._open(path)
        for other in Path("/dev").glob(f"ng{match[1]}n*"):
            with contextlib.suppress(DeviceError):
                self._open(str(other))

    def _open(self, path: str) -> int:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"{path} must be open to this user, as root: {error.strerror}") from error
        namespace = fcntl.ioctl(descriptor, _GET_NAMESPACE)
        if namespace in self._files:
            os.close(descriptor)
        return self._files.setdefault(namespace, descriptor) and namespace

    def submit(self, entry: SubmissionEntry, data: Bytes | None = None, *, timeout_s: float = 60.0) -> int:
        """See NvmeDrive.submit."""
        admin = entry.opcode.admin
        namespace = self.namespace if admin else entry.namespace
        if namespace not in self._files:
            raise DeviceError(f"namespace {namespace} must have a generic device beside the one that was opened")
        address, size = (data.ctypes.data, data.nbytes) if data is not None else (0, 0)
        call = bytearray(_CALL.pack(entry.raw[:16], address, 0, size, entry.raw[40:], int(timeout_s * 1000), 0))
        try:
            status = fcntl.ioctl(self._files[namespace], _ADMIN if admin else _IO, call)
        except OSError as error:
            if error.errno == errno.ENODEV:
                raise DeviceLostError(f"the drive of namespace {namespace} must be there: {error.strerror}") from error
            raise DeviceError(f"Linux must take the command for namespace {namespace}: {error.strerror}") from error
        check_status(entry, status, timeout_s)
        return int(_CALL.unpack(call)[-1])

    def close(self) -> None:
        """See NvmeDrive.close."""
        while self._files:
            os.close(self._files.popitem()[1])
