"""Registers as data: packing, unpacking and the checks at construction."""

import pytest

from nearflash.abi.errors import CommandError, ConfigError
from nearflash.abi.fields import Access, Field, Register, RegisterMap

WORD = Register("word", 0x10, 32, Access.RW, "", (Field("low", 0, 3, ""), Field("high", 28, 4, "")))


def test_fields_survive_a_round_trip() -> None:
    packed = WORD.pack({"low": 5, "high": 9})
    assert packed == 0x9000_0005
    assert WORD.unpack(packed) == {"low": 5, "high": 9}


def test_a_value_wider_than_its_field_is_refused() -> None:
    with pytest.raises(CommandError, match=r"word.low must fit 3 bits, not 8"):
        WORD.pack({"low": 8})


@pytest.mark.parametrize("offset", [0x12, 0x08])
def test_a_map_refuses_overlap_and_misalignment(offset: int) -> None:
    with pytest.raises(ConfigError, match=r"other must lie at a multiple of 4 past 0x14"):
        RegisterMap("m", 64, (WORD, Register("other", offset, 32, Access.RW, "")))


def test_a_map_refuses_registers_past_its_end() -> None:
    with pytest.raises(ConfigError, match=r"must end at 0x10, not 0x14"):
        RegisterMap("m", 16, (WORD,))
