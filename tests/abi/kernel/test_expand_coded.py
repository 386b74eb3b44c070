"""Commands for coded weights: their ranges, their registers, and what is refused."""

from dataclasses import replace

import pytest

from nearflash.abi.bitmap import RowFormat
from nearflash.abi.coded import (
    CODEBOOK_ENTRIES_MAX,
    CodedHeader,
    ElementFormat,
    LevelFormat,
    count_entries,
    level_format,
)
from nearflash.abi.errors import AlignmentError, CommandError, ConfigError, FormatError
from nearflash.abi.kernel.config import expand_config, update_config
from nearflash.abi.kernel.expand import CodedCommand
from nearflash.abi.registers import EXPAND

FP16, BF16, INT8, _ = ElementFormat
CONFIG = expand_config("expand-tiny-levels")
COMMAND = CodedCommand(0x1000, 640, 0x2000, elements=150, block_elements=70, element=BF16)


def test_ranges_are_those_of_padded_blocks():
    """Blocks of 70 elements take 192 bytes, a last one of 10 elements 64."""
    assert (COMMAND.blocks, COMMAND.row_bytes, COMMAND.out_bytes) == (3, 192, 2 * 192 + 64)
    assert COMMAND.reads() == {"matrix": (0x1000, 640)}
    assert COMMAND.writes() == {"dense": (0x2000, 448)}
    assert replace(COMMAND, elements=70).out_bytes == 192
    assert replace(COMMAND, elements=1 << 20, block_elements=1 << 16).out_bytes == 2 << 20
    assert COMMAND.dense is BF16


def test_registers_name_the_elements_as_rows_and_those_of_a_block_as_columns():
    registers = COMMAND.registers()
    assert EXPAND["format"].unpack(registers.pop("format")) == {"element": 2, "coding": 2, "output": 0}
    assert registers == {"in_address": 0x1000, "out_address": 0x2000, "in_bytes": 640, "rows": 150, "columns": 70}


def test_a_command_is_for_one_tensor():
    header = CodedHeader(BF16, 2, False, 150, 70, 4, 640)
    assert COMMAND.expects(header)
    assert COMMAND.expects(replace(header, code_bits=1, has_bitmap=True, group_blocks=1))
    others = ({"element": FP16}, {"elements": 151}, {"block_elements": 71})
    assert not any(COMMAND.expects(replace(header, **other)) for other in others)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"elements": 0}, CommandError, "elements must be between 1 and 4294967295 on expand-tiny-levels, not 0"),
        ({"elements": 1 << 32}, CommandError, "elements must be between"),
        ({"block_elements": 65537}, CommandError, "block_elements must be between 1 and 65536"),
        ({"in_bytes": 1 << 32}, CommandError, "in_bytes must be between"),
        ({"element": INT8}, FormatError, "coded weights must be of fp16 or bf16, not of INT8"),
        ({"in_address": 32}, AlignmentError, "in_address must be a multiple of 64 bytes, not 0x20"),
        ({"out_address": 8}, AlignmentError, "out_address must be a multiple of 64 bytes, not 0x8"),
    ],
)
def test_what_the_kernel_would_refuse_is_named(change, error, message):
    COMMAND.check(CONFIG)
    with pytest.raises(error, match=message):
        replace(COMMAND, **change).check(CONFIG)


@pytest.mark.parametrize("name", ["expand-tiny", "expand-pynq-z2", "expand-smartssd"])
def test_builds_without_it_name_the_format(name):
    with pytest.raises(CommandError, match=rf"format must be plain16 or .*scaled4 on {name}, not levels_bf16"):
        COMMAND.check(expand_config(name))
    assert not expand_config(name).levels
    assert expand_config(name).in_software().levels


def test_another_kernel_is_named():
    with pytest.raises(CommandError, match="a matrix must go to an expand kernel, not to update-tiny"):
        COMMAND.check(update_config("update-tiny"))


def test_digests_of_builds_without_it_are_those_of_before():
    """Bitstreams that exist stay known."""
    digests = {"expand-tiny": "2f5bd7266b9713a4", "expand-pynq-z2": "ae1739f41bcaccb5",
               "expand-smartssd": "429821141619245a"}  # fmt: skip
    assert {name: expand_config(name).digest[:16] for name in digests} == digests


@pytest.mark.parametrize("formats", [("levels_fp16", "levels_bf16"), ("plain16", "levels_fp16"), ()])
def test_a_build_has_rows_and_both_formats_in_levels_or_none(formats):
    with pytest.raises(ConfigError, match="none or both of levels_fp16, levels_bf16"):
        replace(CONFIG, formats=formats)


def test_formats_follow_those_of_rows():
    assert [*LevelFormat] == [len(RowFormat), len(RowFormat) + 1]
    assert [level_format(each.element) for each in LevelFormat] == [*LevelFormat]


def test_codebooks_have_an_entry_for_each_code_that_is_not_the_last():
    assert (count_entries(1), count_entries(2), CODEBOOK_ENTRIES_MAX) == (6, 10, 10)
