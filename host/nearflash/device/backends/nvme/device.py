"""Device `nvme`: a kernel as a computational program of an NVMe drive, on its Subsystem Local Memory.

`nvme:/dev/ng0n1`, or `nvme:update-smartssd@/dev/ng0n1`: the generic device of a namespace of Computational Programs.
The program is the drive's own: NEARFLASH_NVME_PROGRAM names its file, NEARFLASH_NVME_PROGRAM_TYPE its type there.

The program's parameters are a block of local memory: the kernel's registers, at the offsets that they have on a board.
Execute Program gives its address in CPARAM1, the configuration's digest in CPARAM2. The program obeys the control word
(with ap_start it runs the command), and leaves status, counters and identity there; its return value is not used.
"""

import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import DeviceError, UnknownDeviceError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.kernel.config import config as named_config
from nearflash.abi.python310 import Self
from nearflash.device.backends.nvme.drive import CharacterDrive, NvmeDrive, generic_devices
from nearflash.device.backends.nvme.entries import (
    ACTIVATE,
    EXECUTE,
    IDENTIFY,
    LOAD,
    RANGE_SET,
    CommandSet,
    memory_ranges,
)
from nearflash.device.backends.nvme.memory import CHUNK_BYTES, LocalMemory
from nearflash.device.base import Buffer, LinkBytes
from nearflash.device.memory import PAGE_BYTES, anonymous
from nearflash.device.registers import RegisterDevice

__all__ = ["PROGRAM", "PROGRAM_TYPE", "NvmeDevice"]

PROGRAM, PROGRAM_TYPE = "NEARFLASH_NVME_PROGRAM", "NEARFLASH_NVME_PROGRAM_TYPE"
"""Environment variables: the program's file, and the type that the drive gives such programs (default 1)."""
_INDEX = 1
"""Program index under which the program is loaded."""
_LIST_OF_NAMESPACES, _NAMESPACE_OF_SET = 0x07, 0x05
"""Identify: active namespaces of a command set; what a command set states of a namespace."""
_CREATE, _DELETE, _LOAD, _UNLOAD, _UNIQUE, _OFF, _ON = 0, 1, 0, 1, 1, 0, 1
_MOST_RANGES, _RANGE_BYTES = 255, (1 << 32) - PAGE_BYTES
"""Of a memory range set, and of one of its ranges."""
_POLL_S = 0.05
_IDLE_S = 10.0
_COMMAND_S = 3600.0
"""After which Linux aborts a program."""


class NvmeDevice(RegisterDevice):
    """A kernel on an open drive, whose program is loaded here. Closing it unloads the program and closes the drive."""

    DEFAULT_BUILD: ClassVar[str] = "smartssd"

    def __init__(self, config: KernelConfig, drive: NvmeDrive, program: bytes, program_type: int, card: str) -> None:
        self._drive, self._map, self._digest = drive, config.registers, config.digest64
        self._namespace, self._type = drive.namespace, program_type
        self.memory = LocalMemory(drive, *self._find_memory())
        self._thread = ThreadPoolExecutor(1, "nearflash-nvme")
        self._work: Future[None] | None = None
        self._set: int | None = None
        self._loaded = False
        try:
            self._load(program)
            self._block = self.memory.allocate(-(-self._map.size_bytes // PAGE_BYTES) * PAGE_BYTES, LinkBytes())
            self._ranges: dict[int, int] = {self._block.address: self._block.size_bytes}
            self._execute()
            super().__init__("nvme", config, self.memory)
        except BaseException:
            self._release()
            raise
        self.identity = replace(self.identity, card=card)

    @classmethod
    def open(cls, config: str) -> Self:
        """A drive has a name: see `open_card`."""
        raise UnknownDeviceError(f"a drive must be named, nvme:{config}@/dev/ng0n1 or nvme:/dev/ng0n1")

    @classmethod
    def open_card(cls, config: str, card: str, environment: Mapping[str, str] = os.environ) -> Self:
        """Open the drive whose generic device is `card`.

        Raises UnknownDeviceError where it, or the program's file, is not there, DeviceError where the namespace is not
        of Computational Programs or the drive refuses the program, DigestError for another kernel's program.
        """
        build, name, kind = named_config(config), environment.get(PROGRAM, ""), environment.get(PROGRAM_TYPE, "1")
        drive = open_drive(card)
        try:
            if not Path(name).is_file() or not kind.isdecimal():
                raise UnknownDeviceError(
                    f"{PROGRAM} must name the file of the drive's program, and {PROGRAM_TYPE} its number there, "
                    f"not {name!r} and {kind!r}"
                )
            return cls(build, drive, Path(name).read_bytes(), int(kind), card)
        except BaseException:
            drive.close()
            raise

    @classmethod
    def presence(cls) -> str:
        """Namespaces, whatever command set they are of. Raises UnknownDeviceError where there are none."""
        if not (there := generic_devices()):
            raise UnknownDeviceError("an NVMe namespace must have a generic device, such as /dev/ng0n1; there is none")
        return f"namespaces {', '.join(there)}"

    def read_register(self, offset: int) -> int:
        """The 32-bit register at a byte offset, as the program left it; the control word is 0 while it runs."""
        running = self._work is not None and (not self._work.done() or self._work.exception() is not None)
        return 0 if running and offset == self._map["control"].offset else int(self._words[offset // 4])

    def write_register(self, offset: int, value: int) -> None:
        """Set the 32-bit register at a byte offset; the control word has the program run."""
        self._words[offset // 4] = value
        control = self._map["control"]
        if offset == control.offset and control.unpack(value)["ap_start"]:
            self._work = self._thread.submit(self._execute)

    def pause(self) -> None:
        """Wait for the program a little. Raises what it ended with: DeviceError, WaitTimeoutError."""
        if self._work is not None and not wait([self._work], _POLL_S).not_done:
            self._work.result()

    def reset_kernel(self) -> None:
        """Wait for the program to end. Raises DeviceError where it does not within 10 s."""
        if self._work is not None and wait([self._work], _IDLE_S).not_done:
            raise DeviceError(f"the program of {self.identity.name} must end within {_IDLE_S:g} s: reset the drive")
        self._work = None

    def allocate(self, size_bytes: int) -> Buffer:
        """A buffer in local memory. Raises AddressError when it is full."""
        buffer = super().allocate(size_bytes)
        self._change_ranges(self._ranges | {buffer.address: -(-size_bytes // PAGE_BYTES) * PAGE_BYTES})
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give the buffer's range back."""
        super().free(buffer)
        self._change_ranges({address: size for address, size in self._ranges.items() if address != buffer.address})

    def close(self) -> None:
        """Unload the program, as far as the drive answers, and close it. May be called twice."""
        if self._open:
            with suppress(DeviceError):
                super().close()
            self._open = False
            self._release()

    # Parts

    @property
    def _words(self) -> NDArray[np.uint32]:
        return self._block.host.view("<u4")

    def _find_memory(self) -> tuple[int, int]:
        """The memory namespace, and its size. Raises DeviceError where the drive has none, or no programs here."""
        if self._namespace not in self._list_namespaces(CommandSet.PROGRAMS):
            raise DeviceError(
                f"namespace {self._namespace} must be one of Computational Programs, of which the drive lists "
                f"{self._list_namespaces(CommandSet.PROGRAMS) or 'none'}"
            )
        memories = self._list_namespaces(CommandSet.MEMORY)
        if not memories:
            raise DeviceError("the drive must have a namespace of Subsystem Local Memory, not none")
        data = self._describe(memories[0], _NAMESPACE_OF_SET, CommandSet.MEMORY)
        return memories[0], int(data[:2].view("<u8")[0])

    def _list_namespaces(self, command_set: CommandSet) -> list[int]:
        listed = self._describe(0, _LIST_OF_NAMESPACES, command_set)
        return [int(namespace) for namespace in listed if namespace]

    def _describe(self, namespace: int, what: int, command_set: CommandSet) -> NDArray[np.uint32]:
        data = anonymous(PAGE_BYTES)
        self._drive.submit(IDENTIFY.pack(namespace, cns=what, csi=command_set), data)
        return data.view("<u4")

    def _load(self, program: bytes) -> None:
        image = np.frombuffer(program, np.uint8)
        given = {"pind": _INDEX, "ptype": self._type, "sel": _LOAD, "pit": _UNIQUE, "psize": image.size,
                 "pid": self._digest}  # fmt: skip
        try:
            for start in range(0, image.size, CHUNK_BYTES):
                part = image[start : start + CHUNK_BYTES]
                entry = LOAD.pack(self._namespace, **given, numb=part.size, loff=start)
                self._drive.submit(entry, part)
            self._loaded = True
            self._drive.submit(ACTIVATE.pack(self._namespace, pind=_INDEX, sel=_ON))
        except DeviceError as error:
            raise DeviceError(
                f"the program must be loaded under index {_INDEX}, type {self._type}: {error}; see {PROGRAM}"
            ) from error

    def _change_ranges(self, ranges: dict[int, int]) -> None:
        """Have the program reach these ranges alone from its next command on."""
        self._delete_set()
        self._ranges = ranges

    def _create_set(self) -> int:
        ranges = _join(self._ranges)
        if len(ranges) > _MOST_RANGES:
            raise DeviceError(f"buffers must lie in at most {_MOST_RANGES} ranges, not {len(ranges)}: free some")
        data = np.frombuffer(memory_ranges(self.memory.namespace, ranges), np.uint8)
        entry = RANGE_SET.pack(self._namespace, sel=_CREATE, numr=len(ranges))
        return self._drive.submit(entry, data)

    def _delete_set(self) -> None:
        if self._set is not None:
            entry = RANGE_SET.pack(self._namespace, sel=_DELETE, rsid=self._set)
            self._set = None
            self._drive.submit(entry)

    def _execute(self) -> None:
        """Run the program on the block, and read what it left there."""
        if self._set is None:
            self._set = self._create_set()
        size, block = self._map.size_bytes, self._block
        self.memory.write(block.address, block.host[:size])
        entry = EXECUTE.pack(self._namespace, pind=_INDEX, rsid=self._set, cparam1=block.address, cparam2=self._digest)
        self._drive.submit(entry, timeout_s=_COMMAND_S)
        self.memory.read(block.address, block.host[:size])

    def _release(self) -> None:
        self._thread.shutdown()
        with suppress(DeviceError):
            self._delete_set()
        if self._loaded:
            self._loaded = False
            for entry in (ACTIVATE.pack(self._namespace, pind=_INDEX, sel=_OFF),
                          LOAD.pack(self._namespace, pind=_INDEX, sel=_UNLOAD)):  # fmt: skip
                with suppress(DeviceError):
                    self._drive.submit(entry)
        self._drive.close()


def _join(ranges: Mapping[int, int]) -> dict[int, int]:
    """The same bytes in fewer ranges, each of less than 4 GiB."""
    joined: dict[int, int] = {}
    last = 0
    for address, size in sorted(ranges.items()):
        for start in range(0, size, _RANGE_BYTES):
            part = min(size - start, _RANGE_BYTES)
            if joined and last + joined[last] == address + start and joined[last] + part <= _RANGE_BYTES:
                joined[last] += part
            else:
                last = address + start
                joined[last] = part
    return joined


def open_drive(path: str) -> NvmeDrive:
    """The drive of a generic device. Raises UnknownDeviceError, DeviceError."""
    return CharacterDrive(path)
