"""Commands of the expand kernel: sizes, what a build refuses, registers."""

from dataclasses import replace

import pytest

from nearflash.abi.bitmap import BitmapHeader, Coding, ElementFormat
from nearflash.abi.errors import AlignmentError, CommandError, ConfigError, FormatError, NearflashError
from nearflash.abi.kernel.config import CONFIGS, expand_config
from nearflash.abi.kernel.expand import ExpandCommand
from nearflash.abi.registers import EXPAND

FP16, BF16, INT8, INT4 = ElementFormat
TINY = expand_config("expand-tiny")
COMMAND = ExpandCommand(0x1000, 4096, 0x2000, rows=3, columns=33, element=FP16)


@pytest.mark.parametrize(("element", "output", "row_bytes"), [(FP16, None, 128), (INT8, None, 64), (INT4, BF16, 128)])
def test_rows_are_padded_to_64_bytes(element: ElementFormat, output: ElementFormat | None, row_bytes: int) -> None:
    command = replace(COMMAND, element=element, output=output)
    command.check(TINY)
    assert command.row_bytes == row_bytes
    assert command.writes() == {"dense": (0x2000, 3 * row_bytes)}
    assert command.reads() == {"matrix": (0x1000, 4096)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"in_address": 0x1020}, AlignmentError, "in_address must be a multiple of 64 bytes, not 0x1020"),
        ({"out_address": 0x2008}, AlignmentError, "out_address must be a multiple of 64 bytes, not 0x2008"),
        ({"rows": 0}, CommandError, "rows must be between 1 and 4294967295 on expand-tiny, not 0"),
        ({"columns": 1025}, CommandError, "columns must be between 1 and 1024 on expand-tiny, not 1025"),
        ({"in_bytes": 1 << 32}, CommandError, "in_bytes must be between 1 and 4294967295 .*, not 4294967296"),
        ({"element": INT4}, FormatError, "a bitmap matrix must be of .*, not of INT4, coding PLAIN, output None"),
    ],
)  # fmt: skip
def test_what_the_kernel_would_refuse_is_refused(
    change: dict[str, int], error: type[NearflashError], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(COMMAND, **change).check(TINY)


def test_a_format_that_the_build_lacks_is_named_with_those_that_it_has() -> None:
    build = replace(TINY, formats=("plain16", "plain8"))
    COMMAND.check(build)
    with pytest.raises(CommandError, match="format must be plain16 or plain8 on expand-tiny, not coded_fp16"):
        replace(COMMAND, coding=Coding.EXPONENTS).check(build)
    replace(COMMAND, coding=Coding.EXPONENTS).check(build.in_software())
    with pytest.raises(CommandError, match="a matrix must go to an expand kernel, not to update-tiny"):
        COMMAND.check(CONFIGS["update-tiny"])


def test_registers_hold_the_formats_as_the_header_does() -> None:
    registers = replace(COMMAND, element=INT4, output=BF16).registers()
    assert EXPAND["format"].unpack(registers["format"]) == {"element": 4, "coding": 0, "output": 2}
    assert set(registers) == {r.name for r in EXPAND if r.access == "rw"}
    header = BitmapHeader(FP16, 3, 33, 2, 4096)
    assert COMMAND.expects(header)
    assert not any(COMMAND.expects(replace(header, **change)) for change in ({"rows": 4}, {"element": BF16}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, "width must be a power of two, 4 to 32, not 64"),
        ({"port_bits": 128}, "port_bits must be 64, 128, 256 or 512 and at least 16 bits an element, not 128"),
        ({"columns_max": 1000}, "columns_max must be a multiple of 512, less than 2\\^32, not 1000"),
        ({"outstanding_bursts": 1}, "outstanding_bursts must be between 2 and 32, not 1"),
        ({"burst_bytes": 48}, "burst_bytes must be a divisor of 4096 of 1 to 256 beats, not 48"),
        ({"formats": ("plain16", "zip")}, "formats must be some of plain16, plain8, .*, not \\('plain16', 'zip'\\)"),
    ],
)
def test_parameters_of_a_build_that_do_not_fit_together_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(expand_config("expand-smartssd"), **change)
