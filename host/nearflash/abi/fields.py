"""Bit fields and registers as data: what every emitter, driver and register file walks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from nearflash.abi.errors import CommandError, ConfigError
from nearflash.abi.python310 import StrEnum

__all__ = ["Access", "Field", "Register", "RegisterMap"]


class Access(StrEnum):
    """How the host may touch a register."""

    RW = "rw"
    """Read and write."""
    RO = "ro"
    """Read only: set by the kernel."""
    CONTROL = "control"
    """XRT control word: UG1393's rules (clear on read, toggle on write), bit by bit."""


@dataclass(frozen=True)
class Field:
    """A run of bits inside a register: bits [lsb, lsb + width)."""

    name: str
    lsb: int
    width: int
    doc: str

    @property
    def mask(self) -> int:
        """Mask of the field in its register."""
        return ((1 << self.width) - 1) << self.lsb

    def extract(self, word: int) -> int:
        """Value of the field in `word`, unsigned."""
        return (word & self.mask) >> self.lsb


@dataclass(frozen=True)
class Register:
    """One register of 32 or 64 bits (64: low word first) at a byte offset from the kernel's base."""

    name: str
    offset: int
    width_bits: int
    access: Access
    doc: str
    fields: tuple[Field, ...] = ()
    reset: int = 0
    """Value after reset; for constants (TYPE, VERSION, …) the value that is always read."""

    def pack(self, values: Mapping[str, int]) -> int:
        """Word made of the named fields. Raises CommandError for a value wider than its field."""
        word = 0
        by_name = {f.name: f for f in self.fields}
        for name, value in values.items():
            if not 0 <= value < (1 << by_name[name].width):
                raise CommandError(f"{self.name}.{name} must fit {by_name[name].width} bits, not {value!r}")
            word |= value << by_name[name].lsb
        return word

    def unpack(self, word: int) -> dict[str, int]:
        """Fields of `word` by name."""
        return {f.name: f.extract(word) for f in self.fields}


@dataclass(frozen=True)
class RegisterMap:
    """The registers of one kernel, by name and in order of offset.

    Raises ConfigError when two registers overlap, an offset is not a multiple of 4, or one lies past `size_bytes`.
    """

    name: str
    size_bytes: int
    registers: tuple[Register, ...]
    _by_name: dict[str, Register] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        end = 0
        for register in self.registers:
            if register.offset % 4 or register.offset < end:
                raise ConfigError(
                    f"{register.name} must lie at a multiple of 4 past {end:#x}, not {register.offset:#x}"
                )
            end = register.offset + register.width_bits // 8
            self._by_name[register.name] = register
        if end > self.size_bytes:
            raise ConfigError(f"registers of {self.name} must end at {self.size_bytes:#x}, not {end:#x}")

    def __getitem__(self, name: str) -> Register:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Register]:
        return iter(self.registers)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name
