"""Commands of the `expand` kernel (docs/contracts/weights.md, section 3)."""

from dataclasses import dataclass
from typing import ClassVar

from nearflash.abi.bitmap import (
    SECTION_BYTES,
    BitmapHeader,
    Coding,
    ElementFormat,
    RowFormat,
    row_format,
    section_bytes,
)
from nearflash.abi.coded import CodedHeader, LevelFormat, level_format
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.kernel.config import ExpandConfig, KernelConfig
from nearflash.abi.registers import EXPAND

__all__ = ["CodedCommand", "ExpandCommand"]


@dataclass(frozen=True)
class ExpandCommand:
    """Expand one bitmap matrix to dense rows, row-major, each padded with zeros to a multiple of 64 bytes.

    Addresses are device byte addresses, multiples of 64. A fault in the matrix ends writing at the row where it was
    met: outputs of a command that ended so are of no use.
    """

    kernel: ClassVar[str] = "expand"

    in_address: int
    in_bytes: int
    """Bytes of the matrix, its header included."""
    out_address: int
    rows: int
    columns: int
    element: ElementFormat
    coding: Coding = Coding.PLAIN
    output: ElementFormat | None = None
    """What scaled elements expand to, fp16 or bf16; None: elements are what they are."""

    @property
    def row_format(self) -> RowFormat:
        """Which sections the rows have. Raises FormatError for formats that do not go together."""
        return row_format(self.element, self.coding, self.output)

    @property
    def dense(self) -> ElementFormat:
        """Format of the dense elements."""
        return self.output or self.element

    @property
    def row_bytes(self) -> int:
        """Bytes from a dense row to the next."""
        return section_bytes(8 * self.columns * self.dense.number_format.bytes)

    @property
    def out_bytes(self) -> int:
        """Bytes of all dense rows."""
        return self.rows * self.row_bytes

    def reads(self) -> dict[str, tuple[int, int]]:
        """The matrix: (address, bytes)."""
        return {"matrix": (self.in_address, self.in_bytes)}

    def writes(self) -> dict[str, tuple[int, int]]:
        """The dense rows: (address, bytes)."""
        return {"dense": (self.out_address, self.out_bytes)}

    def expects(self, header: BitmapHeader) -> bool:
        """Whether the header is that of the matrix that this command is for."""
        mine = (self.rows, self.columns, self.element, self.coding, self.output)
        return mine == (header.rows, header.columns, header.element, header.coding, header.output)

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError, FormatError or AlignmentError where the kernel would refuse the command."""
        _check(config, self.row_format, ("rows", self.rows), ("columns", self.columns), self)

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""
        form = {"element": self.element, "coding": self.coding, "output": self.output or 0}
        return {
            "format": EXPAND["format"].pack(form),
            "in_address": self.in_address,
            "out_address": self.out_address,
            "in_bytes": self.in_bytes,
            "rows": self.rows,
            "columns": self.columns,
        }


@dataclass(frozen=True)
class CodedCommand:
    """Expand coded weights (nearflash.abi.coded), block after block, each padded with zeros to a multiple of 64 bytes.

    Addresses are device byte addresses, multiples of 64. A fault ends writing at the block where it was met: outputs of
    a command that ended so are of no use.
    """

    kernel: ClassVar[str] = "expand"

    in_address: int
    in_bytes: int
    """Bytes of the stream, its header included."""
    out_address: int
    elements: int
    """Of the tensor, less than 2^32."""
    block_elements: int
    element: ElementFormat

    @property
    def row_format(self) -> LevelFormat:
        """Format among those of a build. Raises FormatError for elements that are never coded."""
        return level_format(self.element)

    @property
    def dense(self) -> ElementFormat:
        """Format of the dense elements."""
        return self.element

    @property
    def blocks(self) -> int:
        """Blocks; the last one may have fewer elements."""
        return -(-self.elements // self.block_elements)

    @property
    def row_bytes(self) -> int:
        """Bytes from a dense block to the next."""
        return section_bytes(16 * self.block_elements)

    @property
    def out_bytes(self) -> int:
        """Bytes of all dense blocks."""
        before = self.blocks - 1
        return before * self.row_bytes + section_bytes(16 * (self.elements - before * self.block_elements))

    def reads(self) -> dict[str, tuple[int, int]]:
        """The stream: (address, bytes)."""
        return {"matrix": (self.in_address, self.in_bytes)}

    def writes(self) -> dict[str, tuple[int, int]]:
        """The dense blocks: (address, bytes)."""
        return {"dense": (self.out_address, self.out_bytes)}

    def expects(self, header: CodedHeader) -> bool:
        """Whether the header is that of the stream that this command is for."""
        mine = (self.elements, self.block_elements, self.element)
        return mine == (header.elements, header.block_elements, header.element)

    def check(self, config: KernelConfig) -> None:
        """Raise CommandError, FormatError or AlignmentError where the kernel would refuse the command."""
        sizes = ("elements", self.elements), ("block_elements", self.block_elements)
        _check(config, self.row_format, *sizes, self)

    def registers(self) -> dict[str, int]:
        """Values of the kernel's argument registers, by register name."""
        form = {"element": self.element, "coding": Coding.LEVELS, "output": 0}
        return {
            "format": EXPAND["format"].pack(form),
            "in_address": self.in_address,
            "out_address": self.out_address,
            "in_bytes": self.in_bytes,
            "rows": self.elements,
            "columns": self.block_elements,
        }


def _check(
    config: KernelConfig,
    form: RowFormat | LevelFormat,
    rows: tuple[str, int],
    columns: tuple[str, int],
    command: ExpandCommand | CodedCommand,
) -> None:
    """Raise what `check` of a command raises; rows, columns: the register's values, by the command's name of them."""
    if not isinstance(config, ExpandConfig):
        raise CommandError(f"a matrix must go to an expand kernel, not to {config.full_name}")
    name = form.name.lower()
    if name not in config.formats:
        raise CommandError(f"format must be {' or '.join(config.formats)} on {config.full_name}, not {name}")
    longest = (1 << 32) - 1
    sizes = ((("in_bytes", command.in_bytes), longest), (rows, longest), (columns, config.columns_max))
    for (what, value), most in sizes:
        if not 0 < value <= most:
            raise CommandError(f"{what} must be between 1 and {most} on {config.full_name}, not {value!r}")
    for what, address in (("in_address", command.in_address), ("out_address", command.out_address)):
        if address % SECTION_BYTES:
            raise AlignmentError(f"{what} must be a multiple of {SECTION_BYTES} bytes, not {address:#x}")
