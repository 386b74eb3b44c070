"""Driver of a kernel through its registers: the same for the simulated gateware and for boards.

A backend adds how a 32-bit register is read and written, how time passes between two polls, and where buffers lie.
"""

import time
from abc import abstractmethod

from nearflash.abi import ABI_VERSION
from nearflash.abi.bitmap import bitmap_error
from nearflash.abi.counters import KERNEL_COUNTERS
from nearflash.abi.errors import DeviceError, DigestError, StreamError, WaitTimeoutError
from nearflash.abi.kernel.commands import Command, Completion, Status
from nearflash.abi.kernel.config import KernelConfig
from nearflash.abi.registers import MAGIC
from nearflash.abi.topk import FAULT_TEXTS, StreamFault
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice
from nearflash.device.memory import Memory

__all__ = ["RegisterDevice"]

ADVICE: dict[int, str] = {
    Status.READ_ERROR: "the memory rejected a read: check that the address lies in the memory that this port reaches",
    Status.WRITE_ERROR: "the memory rejected a write: check that the address lies in the memory that this port reaches",
    Status.MISALIGNED: "every address must be a multiple of what the kernel needs; nothing was read or written",
    Status.EMPTY: "the number of parameters, heads, page operations or elements must be at least 1; nothing was read "
    "or written",
    Status.UNSUPPORTED: "this build has no such command or format, or not for so many operations or such long rows; "
    "nothing was read or written",
    **{
        Status[f"STREAM_{fault.name}"]: f"a gradient stream {rule}; discard the slot, compress the gradients again"
        for fault, rule in FAULT_TEXTS.items()
    },
}


class RegisterDevice(CheckedDevice):
    """A kernel driven through its register map.

    A backend makes `read_register` and `write_register` work, then calls this constructor, which reads the identity
    block. Raises DigestError when no kernel answers or when it is not the one that `config` describes.
    """

    clock_hz = 0
    """Clock that the kernel should have, Hz; 0 where it is not known or, as in a simulation, no clock of the host's."""
    clock_run_s = 0.02
    """Shortest time of the commands that the clock is measured with, s."""
    run_s = 0.0
    """From the start of the last command to when its end was seen, s."""

    def __init__(self, backend: str, config: KernelConfig, memory: Memory) -> None:
        self._map = config.registers
        super().__init__(self._identify(backend, config), memory)

    @abstractmethod
    def read_register(self, offset: int) -> int:
        """The 32-bit register at a byte offset from the kernel's base."""

    @abstractmethod
    def write_register(self, offset: int, value: int) -> None:
        """Write the 32-bit register at a byte offset from the kernel's base."""

    @abstractmethod
    def pause(self) -> None:
        """Let time pass between two polls: a board sleeps, a simulation runs some cycles."""

    @abstractmethod
    def reset_kernel(self) -> None:
        """Bring the kernel back to idle, whatever it does; its memory stays."""

    def now(self) -> float:
        """The time, s, from any moment on."""
        return time.monotonic()

    def read(self, name: str) -> int:
        """Value of the named register, 32 or 64 bits (low word first)."""
        register = self._map[name]
        words = [self.read_register(register.offset + i) for i in range(0, register.width_bits // 8, 4)]
        return sum(word << (32 * i) for i, word in enumerate(words))

    def write(self, name: str, value: int) -> None:
        """Write the named register, 32 or 64 bits (low word first)."""
        register = self._map[name]
        for i in range(register.width_bits // 32):
            self.write_register(register.offset + 4 * i, value >> (32 * i) & 0xFFFF_FFFF)

    def _identify(self, backend: str, config: KernelConfig) -> Identity:
        block = f"{config.kernel}_type"
        expected = {"magic": MAGIC, "abi_version": ABI_VERSION, block: self._map[block].reset}
        for name, value in expected.items():
            stated = self.read(name)
            if stated != value:
                raise DigestError(
                    f"register {name} of {backend}:{config.full_name} must be {value:#x}, not {stated:#x}: "
                    f"load the build of {config.full_name} that belongs to this version of nearflash"
                )
        digest64 = self.read("config_digest")
        if digest64 != config.digest64:
            raise DigestError(
                f"config digest of {backend}:{config.full_name} must be {config.digest64:016x}, not {digest64:016x}: "
                "the kernel was built from another configuration or contract; build it again, or open the "
                "configuration that it was built from"
            )
        return Identity(backend, config, digest64, expected["abi_version"], self.read("git_revision"))

    def _start(self, command: Command) -> None:
        for name, value in command.registers().items():
            self.write(name, value)
        self._started_s = self.now()
        self.write("control", self._map["control"].pack({"ap_start": 1}))

    def _finish(self, timeout_s: float) -> Completion:
        control = self._map["control"]
        deadline = time.monotonic() + timeout_s
        while not control.unpack(self.read("control"))["ap_done"]:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"{self.identity.name} must finish within {timeout_s} s; it still runs and waits for "
                    f"{self._waiting_streams()}: wait for longer, or reset the device"
                )
            self.pause()
        self.run_s = self.now() - self._started_s
        status, address = self.read("status"), self.read("fault_address")
        counters = {name: self.read(name) for name in KERNEL_COUNTERS[self.identity.config.kernel]}
        self.write("control", control.pack({"ap_continue": 1}))
        if status != Status.OK:
            raise self._fault(status, address)
        return Completion(counters)

    def _fault(self, status: int, address: int) -> DeviceError:
        """The error for a command that ended with that status."""
        name = Status(status).name if status in ADVICE else f"status {status}"
        advice = ADVICE.get(status, "this host does not know that status")
        text = f"{self.identity.name} ended with {name} at address {address:#x}: "
        fault = Status(status).stream_fault if status in ADVICE else StreamFault.NONE
        if fault and self.identity.config.kernel == "expand":
            return StreamError(f"{text}{bitmap_error(fault, 'the one there')}", fault)
        return StreamError(text + advice, fault) if fault else DeviceError(text + advice)

    def _waiting_streams(self) -> str:
        """Name what the kernel waits for, as it reports; where it reports nothing, streams whose wait counters rise."""
        if "waiting" in self._map:
            fields = self._map["waiting"].unpack(self.read("waiting"))
            names = [f"{name} {value:#x}" if value > 1 else name for name, value in fields.items() if value]
        else:
            counters = [name for name in KERNEL_COUNTERS[self.identity.config.kernel] if name.startswith("wait_")]
            before = {name: self.read(name) for name in counters}
            self.pause()
            rising = [name for name in counters if self.read(name) > before[name]]
            names = [name.removeprefix("wait_").removesuffix("_cycles") for name in rising]
        return ", ".join(names) or "nothing that it names"

    def _abort(self) -> None:
        self.reset_kernel()
