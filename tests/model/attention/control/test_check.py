"""The rules of a descriptor; tests/gateware/attend/test_check.py has the same cases."""

import dataclasses

import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import CONFIGS
from nearflash.model.attention.control.check import read_descriptor

CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], mask_beats=0)  # heads share its store in equal parts
GOOD = AttendDescriptor(
    Mode.PAGE | Mode.PROBABILITY, PageTag(7, 3, 5), 128, 5000, 4, 32, 40, 64, 16, True, 1024, IndexFormat.INT4, 8192,
    0.125, 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, top_p=60000,
)  # fmt: skip
DENSE = dataclasses.replace(
    GOOD,
    mode=Mode.DENSE | Mode.REFERENCE,
    reference=(-2048, 2047, 0, 0),
    score_dims=0,
    top_k=0,
    top_p=0,
    block_tokens=0,
)


def read(contexts=8, **change):
    return read_descriptor(dataclasses.replace(GOOD, **change).pack(), CONFIG, contexts)


@pytest.mark.parametrize("one", [GOOD, DENSE, dataclasses.replace(GOOD, top_p=0, mode=Mode(0), tokens=2000)])
def test_what_was_packed_is_read(one):
    assert read_descriptor(one.pack(), CONFIG, 8) == one


@pytest.mark.parametrize("change", [
    {"group": 0}, {"group": 9}, {"dim": 0}, {"dim": 260}, {"dim": 126}, {"tokens": 0}, {"tokens": (1 << 17) + 1},
    {"group_tokens": 0}, {"group_tokens": 18}, {"group_tokens": 68}, {"group_tokens": 20, "block_tokens": 960},
    {"interleaved": 2}, {"page_bytes": 2048}, {"page_bytes": 32768}, {"scale": 2.0**-15}, {"scale": 256.0},
    {"scale": -0.1}, {"scale": float("nan")}, {"q_address": 4}, {"out_address": 1 << 48}, {"token_table_address": 2},
    {"index_table_address": 1}, {"v_mean_address": 1 << 63}, {"score_dims": 0}, {"score_dims": 129}, {"top_k": 0},
    {"top_k": 5001}, {"block_tokens": 0}, {"block_tokens": 1040}, {"block_tokens": 24}, {"mode": Mode.PAGE},
    {"mode": 16}, {"mode": Mode.DENSE, "top_p": 0}, {"index_format": 3}, {"block_tokens": 1024, "group_tokens": 12},
    {"mode": Mode.DENSE | Mode.REFERENCE, "reference": (0, 2048), "top_p": 0},
    {"mode": GOOD.mode | Mode.REFERENCE, "reference": (-2049,)}, {"mode": Mode(0), "top_p": 0, "tokens": 2049},
], ids=str)  # fmt: skip
def test_a_descriptor_that_breaks_a_rule(change):
    assert read() and read(**change) is None
