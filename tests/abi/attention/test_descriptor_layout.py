"""Bytes of descriptors and of completions, and values that do not fit their places."""

from dataclasses import replace

import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import (
    COMPLETION_BYTES,
    DESCRIPTOR_BYTES,
    DESCRIPTOR_FIELDS,
    AttendDescriptor,
    HeadCompletion,
    Mode,
)
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.abi.formats import fp32_bits

HEAD = AttendDescriptor(
    mode=Mode.PAGE | Mode.PROBABILITY | Mode.REFERENCE, page_tag=PageTag(0x01020304, 0x0506, 0x0708), dim=0x90,
    tokens=0x0A0B0C0D, group=3, score_dims=0x20, top_k=0x0E0F1011, local_window=0x12131415, group_tokens=16,
    interleaved=True, block_tokens=0x0400, index_format=IndexFormat.INT4, page_bytes=8192, scale=0.125,
    q_address=0x18, v_mean_address=0x20, out_address=0x28, index_table_address=0x30, token_table_address=0xFFFFFFFFF8,
    top_p=0xF333, reference=(5, -6, 7),
)  # fmt: skip
#: First byte and bytes of each field.
LAYOUT = {
    "mode": (0, 1),
    "group": (1, 1),
    "index_format": (2, 1),
    "interleaved": (3, 1),
    "dim": (4, 2),
    "score_dims": (6, 2),
    "tokens": (8, 4),
    "top_k": (12, 4),
    "local_window": (16, 4),
    "group_tokens": (20, 2),
    "block_tokens": (22, 2),
    "page_log2": (24, 1),
    "reserved": (25, 1),
    "top_p": (26, 2),
    "scale": (28, 4),
    "sequence": (32, 4),
    "layer": (36, 2),
    "head": (38, 2),
    "q_address": (40, 8),
    "v_mean_address": (48, 8),
    "out_address": (56, 8),
    "index_table_address": (64, 8),
    "token_table_address": (72, 8),
    **{f"reference_{head}": (80 + 2 * head, 2) for head in range(8)},
}
VALUES = {
    "mode": 0b1110,
    "group": 3,
    "index_format": 2,
    "interleaved": 1,
    "dim": 0x90,
    "score_dims": 0x20,
    "tokens": 0x0A0B0C0D,
    "top_k": 0x0E0F1011,
    "local_window": 0x12131415,
    "group_tokens": 16,
    "block_tokens": 0x0400,
    "page_log2": 13,
    "reserved": 0,
    "top_p": 0xF333,
    "scale": fp32_bits(0.125),
    "sequence": 0x01020304,
    "layer": 0x0506,
    "head": 0x0708,
    "q_address": 0x18,
    "v_mean_address": 0x20,
    "out_address": 0x28,
    "index_table_address": 0x30,
    "token_table_address": 0xFFFFFFFFF8,
    "reference_0": 5,
    "reference_1": 0x10000 - 6,
    "reference_2": 7,
    **{f"reference_{head}": 0 for head in range(3, 8)},
}


def test_where_each_field_lies():
    assert DESCRIPTOR_FIELDS == LAYOUT
    ends = [start + size for start, size in LAYOUT.values()]
    assert [0, *ends[:-1]] == [start for start, _ in LAYOUT.values()], "no gaps"
    assert ends[-1] == 96, "the rest is reserved"


def test_each_field_is_packed_at_its_place():
    record = HEAD.pack()
    assert len(record) == DESCRIPTOR_BYTES == 128
    found = {name: int.from_bytes(record[start : start + size], "little") for name, (start, size) in LAYOUT.items()}
    assert found == VALUES
    assert record[96:] == bytes(32)


@pytest.mark.parametrize(
    "changes",
    [
        {"group": 256},
        {"dim": 1 << 16},
        {"score_dims": -1},
        {"tokens": 1 << 32},
        {"top_k": 1 << 32},
        {"local_window": -1},
        {"top_p": 1 << 16},
        {"page_tag": PageTag(1 << 32, 0, 0)},
        {"page_tag": PageTag(0, 1 << 16, 0)},
        {"q_address": 1 << 64},
        {"reference": (1 << 15,)},
        {"reference": (0,) * 9},
    ],
    ids=str,
)
def test_what_does_not_fit(changes):
    with pytest.raises(CommandError, match="every field of a descriptor must fit its place"):
        replace(HEAD, **changes).pack()


def test_a_scale_past_fp32():
    with pytest.raises(CommandError, match="a scalar must be within the fp32 range"):
        replace(HEAD, scale=1e39).pack()


def test_bits_of_the_modes():
    assert {mode.name: int(mode) for mode in Mode} == {"DENSE": 1, "PAGE": 2, "PROBABILITY": 4, "REFERENCE": 8}


def test_completions():
    ended = HeadCompletion(Fault.MEMORY | Fault.WATCHDOG, 5, 6, 7, (1, -2, 3, -4, 5, -6, 7, -32768))
    text = "02020000 05000000 06000000 07000000 0100 feff 0300 fcff 0500 faff 0700 0080"
    assert ended.pack() == bytes.fromhex(text)
    assert len(ended.pack()) == COMPLETION_BYTES == 32
    assert HeadCompletion.unpack(ended.pack()) == ended


def test_a_completion_of_few_heads_has_no_maximum_for_the_others():
    ended = HeadCompletion(Fault(0), 0, 0, 0, (9,))
    assert HeadCompletion.unpack(ended.pack()).maximum == (9, *[-32768] * 7)
