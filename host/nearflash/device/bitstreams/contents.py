"""Statements of a build's files about themselves, compared with its board and its configuration.

A manifest's SHA-256 says that a file is the one that was kept; what it is stands in the file: a .bit has its part, the
code of the device that it configures, and our label; a .hwh has part, kernel, configuration, registers and clock; an
.xclbin its length.

Source: AMD UG470, tables 1-1 (device codes) and 5-19 to 5-23 (packets); PYNQ's and XRT's readers.
"""

import struct
from pathlib import Path
from xml.etree import ElementTree

from nearflash.abi.errors import BitstreamError
from nearflash.abi.kernel.config import KernelConfig
from nearflash.device.bitstreams.board import Board
from nearflash.device.bitstreams.header import Label, split_bit
from nearflash.support.files import read_bytes

__all__ = ["check_bit", "check_handoff", "check_xclbin", "device_code"]

_DEVICE_CODES = {"xc7z010": 0x3722093, "xc7z020": 0x3727093, "xc7z045": 0x3731093}
_SYNC, _CODE_REGISTER, _WRITE = bytes.fromhex("aa995566"), 12, 2
_CLOCK = "PCW_FPGA0_PERIPHERAL_FREQMHZ"
_MOST_PACKETS = 1000
_HANDOFF_BYTES = 1 << 26
_XCLBIN_LENGTH_AT = 304


def check_bit(path: Path, board: Board, label: Label) -> None:
    """Raise BitstreamError for a .bit of another part, or whose label is not of this build and of its own bits."""
    header, payload = split_bit(path)
    if _plain(header.part) not in _spellings(board.part):
        raise BitstreamError(f"{path} must be for {board.part}, not for {header.part!r}")
    code = _DEVICE_CODES.get(board.part[:7])
    if code is not None and (found := device_code(payload)) != code:
        stated = "none" if found is None else f"{found:#x}"
        raise BitstreamError(f"{path} must configure a device of code {code:#x} ({board.part}), not {stated}")
    label.check(header, payload, path)


def _plain(part: str) -> str:
    return part.lower().removeprefix("xc").replace("-", "")


def _spellings(part: str) -> set[str]:
    """A part with and without grades of speed and temperature, as tools write it."""
    pieces = part.split("-")
    return {_plain("-".join(pieces[: count + 1])) for count in range(len(pieces))}


def device_code(payload: bytes) -> int | None:
    """Read the first write to the register of device codes, without its revision; None where there is none."""
    at = payload.find(_SYNC) + len(_SYNC)
    if at < len(_SYNC):
        return None
    for _ in range(_MOST_PACKETS):
        if at + 8 > len(payload):
            return None
        (packet,) = struct.unpack_from(">I", payload, at)
        kind, action, register, count = packet >> 29, packet >> 27 & 3, packet >> 13 & 31, packet & 0x7FF
        if kind != 1:
            return None
        if (action, register, count) == (_WRITE, _CODE_REGISTER, 1):
            return int(struct.unpack_from(">I", payload, at + 4)[0]) & 0x0FFF_FFFF
        at += 4 + 4 * count
    return None


def check_handoff(path: Path, board: Board, build: KernelConfig, clock_hz: int) -> None:
    """Raise BitstreamError for a .hwh of another part, kernel, configuration, register map or clock."""
    root = _handoff(path)
    system = root.find("SYSTEMINFO")
    part = "" if system is None else "".join(system.get(key, "") for key in ("DEVICE", "PACKAGE", "SPEEDGRADE"))
    if _plain(part) not in _spellings(board.part):
        raise BitstreamError(f"{path} must be for {board.part}, not for {part!r}")
    name = f"nearflash:kernel:{build.kernel}:1.0"
    kernels = [module for module in root.iter("MODULE") if module.get("VLNV", "").startswith("nearflash:kernel:")]
    if [kernel.get("VLNV") for kernel in kernels] != [name]:
        names = ", ".join(kernel.get("VLNV", "") for kernel in kernels) or "none"
        raise BitstreamError(f"{path} must have one kernel, {name}, not {names}")
    parameters = _parameters(kernels[0])
    stated = {"CONFIG": build.full_name, "CONFIG_DIGEST": build.digest}
    if board.flow != "open":  # Vivado's has what the packaged kernel has as parameters
        stated = {key: value for key, value in stated.items() if key in parameters}
    for key, value in stated.items():
        if parameters.get(key) != value:
            raise BitstreamError(
                f"{path} must have {key} {value}, not {parameters.get(key)!r:.80}: it is of another build"
            )
    _check_registers(path, board, build, kernels[0])
    if board.flow == "open":  # Vivado's states what was asked for, and the board makes what is nearest
        _check_clock(path, root, clock_hz)


def _handoff(path: Path) -> ElementTree.Element:
    content = read_bytes(path, _HANDOFF_BYTES)
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:  # which may expand without end
        raise BitstreamError(f"{path} must be a hardware handoff, without entities of its own")
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError, RecursionError) as error:
        raise BitstreamError(f"{path} must be a hardware handoff in XML: {error}") from error
    if root.tag != "EDKSYSTEM":
        raise BitstreamError(f"{path} must be a hardware handoff, EDKSYSTEM, not {root.tag!r:.80}")
    return root


def _parameters(module: ElementTree.Element) -> dict[str, str]:
    return {parameter.get("NAME", ""): parameter.get("VALUE", "") for parameter in module.iter("PARAMETER")}


def _check_registers(path: Path, board: Board, build: KernelConfig, kernel: ElementTree.Element) -> None:
    """Name and offset of each word of the kernel's register map; 64-bit ones are two, `name_1` and `name_2`."""
    expected = {}
    for register in build.registers:
        words = register.width_bits // 32
        for word in range(words):
            name = register.name if words == 1 else f"{register.name}_{word + 1}"
            expected[name] = str(register.offset + 4 * word)
    registers = {}
    for element in kernel.iter("REGISTER"):
        properties = {prop.get("NAME"): prop.get("VALUE", "") for prop in element.findall("PROPERTY")}
        registers[element.get("NAME", "")] = properties.get("ADDRESS_OFFSET", "none")
    if board.flow != "open" and not registers:
        return
    if wrong := [name for name in (*expected, *registers) if expected.get(name) != registers.get(name)]:
        at = f"at {expected.get(wrong[0], 'no')} byte offset, not {registers.get(wrong[0], 'no')}"
        raise BitstreamError(f"{path} must have the registers of {build.full_name}: {wrong[0]!r:.80} {at}")


def _check_clock(path: Path, root: ElementTree.Element, clock_hz: int) -> None:
    """Check the clock that PYNQ sets for the kernel."""
    every = (_parameters(module) for module in root.iter("MODULE"))
    stated = next((parameters[_CLOCK] for parameters in every if _CLOCK in parameters), "none")
    if stated != f"{clock_hz / 1e6:.6f}":
        raise BitstreamError(f"{path} must set the clock to {clock_hz / 1e6:.6f} MHz, not {stated!r:.80}")


def check_xclbin(path: Path) -> None:
    """Raise BitstreamError for what is no .xclbin, or not as long as it states."""
    with path.open("rb") as file:
        begin = file.read(_XCLBIN_LENGTH_AT + 8)
    size_bytes = path.stat().st_size
    if not begin.startswith(b"xclbin2\0") or len(begin) < _XCLBIN_LENGTH_AT + 8:
        raise BitstreamError(f"{path} must be an .xclbin, not one that begins {begin[:8].hex() or 'with nothing'}")
    (stated,) = struct.unpack_from("<Q", begin, _XCLBIN_LENGTH_AT)
    if stated != size_bytes:
        raise BitstreamError(f"{path} must have the {stated} bytes that it states, not {size_bytes}")
