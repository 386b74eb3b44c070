"""A batch of heads: what it packs, what it refuses, and how completions come back."""

from dataclasses import replace

import pytest

from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, HeadCompletion, Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import AlignmentError, CommandError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.registers import ATTEND

HEAD = AttendDescriptor(
    Mode.DENSE | Mode.REFERENCE, PageTag(1, 2, 3), 64, 100, 2, 0, 0, 0, 16, False, 0, IndexFormat.FP16, 4096, 0.125,
    0x1000, 0x2000, 0x3000, 0x4000, 0x5000, reference=(3, -4),
)  # fmt: skip
BATCH = AttendBatch((HEAD, replace(HEAD, out_address=0x3100)), 0x8000, 0x9000, contexts=4, watchdog_cycles=7)
CONFIG = CONFIGS["attend-tiny"]


def test_descriptors_and_completions_lie_one_behind_the_other() -> None:
    assert BATCH.pack() == HEAD.pack() + BATCH.descriptors[1].pack()
    ended = (HeadCompletion(Fault(0), 1, 2, 3, (4,) * 8), HeadCompletion(Fault.MISDIRECTED, 5, 6, 7, (-8,) * 8))
    assert BATCH.completions(b"".join(one.pack() for one in ended) + b"rest") == ended


def test_registers_are_the_arguments_of_the_kernel() -> None:
    values = {
        "command": 0, "count": 2, "descriptors_address": 0x8000, "completions_address": 0x9000, "contexts": 4,
        "watchdog": 7,
    }  # fmt: skip
    assert BATCH.registers() == values
    assert all(ATTEND[name].access == "rw" for name in values)


def test_ranges_are_those_of_every_head() -> None:
    assert BATCH.reads() == {
        "descriptors": (0x8000, 256), "head 0 q": (0x1000, 256), "head 0 v_mean": (0x2000, 256),
        "head 1 q": (0x1000, 256), "head 1 v_mean": (0x2000, 256),
    }  # fmt: skip
    assert BATCH.writes() == {"completions": (0x9000, 64), "head 0 out": (0x3000, 256), "head 1 out": (0x3100, 256)}


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"descriptors": ()}, CommandError, "a batch must hold at least 1 head, not 0"),
        ({"contexts": 3}, CommandError, "contexts must be a power of two up to 4, not 3"),
        ({"contexts": 8}, CommandError, "contexts must be a power of two up to 4, not 8"),
        ({"watchdog_cycles": 1 << 32}, CommandError, "watchdog_cycles must fit 32 bits, not 4294967296"),
        ({"descriptors_address": 0x8040}, AlignmentError, "must be a multiple of 128 bytes, not 0x8040"),
        ({"completions_address": 0x9008}, AlignmentError, "must be a multiple of 32 bytes, not 0x9008"),
    ],
)
def test_what_the_kernel_would_refuse(changes, error, text) -> None:
    BATCH.check(CONFIG)
    with pytest.raises(error, match=text):
        replace(BATCH, **changes).check(CONFIG)


def test_another_kernel_is_refused() -> None:
    with pytest.raises(CommandError, match="must go to an attend kernel, not to update-tiny"):
        BATCH.check(CONFIGS["update-tiny"])
