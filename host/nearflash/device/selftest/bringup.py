"""Bring-up of a device, stage by stage, from the identity to the bandwidth.

Each stage needs only what the stages before it have shown, so that the first one that fails is where to look.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, DeviceError, NearflashError, ReplayError
from nearflash.abi.fields import Access, Register
from nearflash.device.base import Buffer, Device
from nearflash.device.registers import RegisterDevice
from nearflash.device.selftest.clock import measure_clock
from nearflash.device.selftest.expand import SCALED_FORMATS, compare_matrices
from nearflash.device.selftest.run import compare

__all__ = ["STAGES", "StageResult", "bring_up"]

_PATTERNS = (0xAAAA_AAAA, 0x5555_5555, 0xFFFF_FFFF, 0)
_DMA_BYTES = (1, 4096, 4097, 1 << 16)
_BANDWIDTH_BYTES = 8 << 20
_BARE = ("clock", "registers")
"""Stages of a device's registers, which no transcript holds."""
_SLOWEST, _FASTEST = 0.9, 1.02
"""Of the clock that should be there: a host sees the end of a command late, and never before it."""


@dataclass(frozen=True)
class StageResult:
    """Result of a stage."""

    name: str
    passed: bool
    found: str
    """What was seen; where the stage failed, what to check."""


def bring_up(
    device: Device, bare: Device, *, params: int, tokens: int, columns: int, seed: int
) -> Iterator[StageResult]:
    """The stages of STAGES in order, up to the first that fails; registers where `bare` has them.

    bare: the device, or the one that is recorded, whose registers no transcript holds. params, tokens, columns: size of
    the golden command, as of `compare`. Raises CommandError for sizes that the build has no room for.
    """
    sizes = {"params": params, "tokens": tokens, "columns": columns, "seed": seed}
    for name, run, advice in STAGES:
        if not _has_stage(name, bare):
            continue
        try:
            result, passed = run(bare if name in _BARE else device, sizes), True
        except (CommandError, ReplayError):
            raise
        except NearflashError as error:
            result, passed = f"{error}; check {advice}", False
        yield StageResult(name, passed, result)
        if not passed:
            return


def _has_stage(name: str, bare: Device) -> bool:
    if name == "clock":
        return isinstance(bare, RegisterDevice) and bool(bare.clock_hz)
    if name == "products":  # the golden commands of the other kernels multiply
        return bare.identity.config.kernel == "expand"
    return name != "registers" or isinstance(bare, RegisterDevice)


def _clock(device: Device, _: dict[str, int]) -> str:
    assert isinstance(device, RegisterDevice)
    cycles, seconds = measure_clock(device)
    found, wanted = cycles / seconds / 1e6, device.clock_hz / 1e6
    measured = f"{cycles} cycles in {seconds * 1e3:.3g} ms"
    if not _SLOWEST <= found / wanted <= _FASTEST:
        raise DeviceError(f"the clock must be {wanted:.1f} MHz, not {found:.1f} MHz ({measured})")
    return f"{found:.1f} MHz measured, {measured}, for {wanted:.1f} MHz"


def _identity(device: Device, _: dict[str, int]) -> str:
    identity = device.identity
    return (
        f"{identity.name}, abi {identity.abi_version}, digest {identity.digest64:016x}, git {identity.git_revision:08x}"
    )


def _registers(device: Device, _: dict[str, int]) -> str:
    """Every writable register holds every pattern, while all others hold their own."""
    assert isinstance(device, RegisterDevice)
    registers = [register for register in device.identity.config.registers if register.access is Access.RW]
    before = {register.name: device.read(register.name) for register in registers}
    held = {register.name: _bits_held(device, register) for register in registers}
    for shift, _pattern in enumerate(_PATTERNS):
        written = {
            register.name: _pattern_of(register, shift + at) & held[register.name]
            for at, register in enumerate(registers)
        }
        for name, value in written.items():
            device.write(name, value)
        for name, value in written.items():
            read_back = device.read(name) & held[name]
            if read_back != value:
                raise DeviceError(f"register {name} must hold {value:#x} while others are written, not {read_back:#x}")
    for name, value in before.items():
        device.write(name, value)
    bits = sum(value.bit_count() for value in held.values())
    return f"{len(registers)} writable registers, {bits} bits hold {len(_PATTERNS)} patterns"


def _pattern_of(register: Register, at: int) -> int:
    word = _PATTERNS[at % len(_PATTERNS)]
    return word << 32 | word if register.width_bits == 64 else word


def _bits_held(device: RegisterDevice, register: Register) -> int:
    """Bits that read 1 after a 1 and 0 after a 0; raises DeviceError where not even the lowest does.

    A register may have fewer bits than its word: an address's upper ones, say.
    """
    device.write(register.name, _pattern_of(register, _PATTERNS.index(0xFFFF_FFFF)))
    ones = device.read(register.name)
    device.write(register.name, 0)
    held = ones & ~device.read(register.name)
    if not held:
        raise DeviceError(f"register {register.name} must hold what is written, not {ones:#x} after ones")
    return held


def _memory(device: Device, sizes: dict[str, int]) -> str:
    """Random bytes down and up again, in two buffers, and through the window for direct I/O where there is one."""
    rng = np.random.default_rng(sizes["seed"])
    windows = 0
    for size in _DMA_BYTES:
        first, second = device.allocate(size), device.allocate(size)
        try:
            for buffer in (first, second):
                buffer.host[:] = rng.integers(0, 256, size, np.uint8)
                buffer.sync_to_device()
            for buffer in (first, second):
                sent = buffer.host.copy()
                buffer.host[:] = ~sent
                buffer.sync_from_device()
                _same(buffer.host, sent, f"{size} bytes at {buffer.address:#x}, down and up,")
                windows += _through_window(buffer, sent)
        finally:
            device.free(first)
            device.free(second)
    window = "window for direct I/O reads the same" if windows else "no window for direct I/O"
    return f"buffers of {', '.join(map(str, _DMA_BYTES))} bytes both ways; {window}"


def _through_window(buffer: Buffer, sent: NDArray[np.uint8]) -> int:
    if buffer.p2p is None:
        return 0
    _same(buffer.p2p, sent, f"window at {buffer.address:#x}")
    buffer.p2p[:] = ~sent
    buffer.sync_from_device()
    _same(buffer.host, ~sent, f"what was stored through the window at {buffer.address:#x}")
    return 1


def _same(found: NDArray[np.uint8], expected: NDArray[np.uint8], what: str) -> None:
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        raise DeviceError(f"{what} must be what was written, not wrong in {wrong.size} bytes from byte {wrong[0]} on")


def _golden(device: Device, sizes: dict[str, int]) -> str:
    first = next(iter(compare(device, **sizes)))
    if first.mismatches:
        raise DeviceError(
            f"{first.case.split()[0]} must equal the model, not differ in {first.mismatches} of {first.words}"
        )
    return f"{' '.join(first.case.split())}: {first.words} words equal the model"


def _products(device: Device, sizes: dict[str, int]) -> str:
    """Formats whose values are products: the first ones pass a kernel whose multipliers ignore an operand."""
    columns, seed = sizes["columns"], sizes["seed"]
    found = list(compare_matrices(device, columns=columns, seed=seed, forms=SCALED_FORMATS, densities=(1.0,)))
    if wrong := [row for row in found if row.mismatches]:
        words, differ = (sum(getattr(row, name) for row in found) for name in ("words", "mismatches"))
        raise DeviceError(f"{wrong[0].case[:22].strip()} must equal the model, not differ: {differ} of {words} words")
    return f"{len(found)} scaled formats: {sum(row.words for row in found)} words equal the model"


def _bandwidth(device: Device, _: dict[str, int]) -> str:
    buffer = device.allocate(_BANDWIDTH_BYTES)
    try:
        rates = [_rate(move) for move in (buffer.sync_to_device, buffer.sync_from_device)]
    finally:
        device.free(buffer)
    return f"{rates[0]:.0f} MB/s down, {rates[1]:.0f} MB/s up, {_BANDWIDTH_BYTES >> 20} MiB each"


def _rate(move: Callable[[], None]) -> float:
    """MB/s."""
    start = time.perf_counter()
    move()
    return _BANDWIDTH_BYTES / 1e6 / max(time.perf_counter() - start, 1e-9)


#: Name, what does it, and what to check where it fails.
STAGES: tuple[tuple[str, Callable[[Device, dict[str, int]], str], str], ...] = (
    ("identity", _identity, "that the bitstream is loaded and its clock runs"),
    ("clock", _clock, "FCLK0's dividers and the I/O PLL; a kernel at another clock than its bitstream's is not timed"),
    ("registers", _registers, "the AXI4-Lite path: its clock, its reset, the kernel's base address and range"),
    ("memory", _memory, "the host's path to the memory: bank of the buffers, P2P, cache maintenance"),
    (
        "golden command",
        _golden,
        "the kernel's AXI4 ports: clock, width, bank, address range of each; then the timing report, "
        "and pins of DSP slices that nothing drives",
    ),
    ("products", _products, "pins of DSP slices that nothing drives: the bitstream's ties; then the timing report"),
    ("bandwidth", _bandwidth, "link width and speed (`lspci -vv`), and what else uses the link"),
)
