"""The driver of the attend kernel, with a device that answers as it is told."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, HeadCompletion, Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, DeviceError, ShapeError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import CONFIGS
from nearflash.device import open_device
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice
from nearflash.device.drivers.attend import Head, attend, most_contexts
from nearflash.device.memory import SimulatedMemory

BOTH = Fault.REFERENCE_HIGH | Fault.REFERENCE_LOW


class Scripted(CheckedDevice):
    """Ends heads with the faults of `script`, by sequence number and start; outputs are q + 1."""

    def __init__(self, script):
        config = CONFIGS["attend-tiny"]
        self.memory, self.script, self.seen = SimulatedMemory(1 << 20), script, []
        super().__init__(Identity("scripted", config, config.digest64, 1, 0), self.memory)

    @classmethod
    def open(cls, config):
        raise NotImplementedError

    def _start(self, command):
        self.seen.append(command)
        assert bytes(self.memory.view(*command.reads()["descriptors"])) == command.pack()
        completions = self.memory.view(*command.writes()["completions"])
        for index, head in enumerate(command.descriptors):
            starts = sum(
                one.page_tag.sequence == head.page_tag.sequence for batch in self.seen for one in batch.descriptors
            )
            faults = self.script.get((head.page_tag.sequence, starts), Fault(0))
            record = HeadCompletion(faults, 1, 2, 3, (5, -6, *[-32768] * 6)).pack()
            completions[32 * index : 32 * index + 32] = np.frombuffer(record, np.uint8)
            q = self.memory.view(head.q_address, 4 * head.dim).view(np.float16)
            if not faults:
                self.memory.view(head.out_address, 4 * head.dim).view(np.float16)[:] = q + 1

    def _finish(self, timeout_s):
        return Completion({"cycles": 1})

    def _abort(self):
        pass


def head(sequence, dim=12):
    descriptor = AttendDescriptor(
        Mode.PAGE,
        PageTag(sequence, 0, 0),
        dim,
        20,
        2,
        4,
        2,
        1,
        4,
        False,
        16,
        IndexFormat.FP16,
        4096,
        0.25,
        0,
        0,
        0,
        0,
        0,
    )
    q = np.arange(2 * dim).reshape(2, dim).astype(np.float16) + sequence
    tables = (np.arange(n, dtype=np.uint64) for n in (5, 3))
    return Head(descriptor, q, np.ones(dim, np.float32), *tables)


def test_outputs_come_back_in_order():
    with Scripted({}) as device:
        done = attend(device, [head(n) for n in range(3)])
        for n, one in enumerate(done.heads):
            np.testing.assert_array_equal(one.value(), head(n).q + 1)
        assert len(done.batches) == 1 and device.seen[0].contexts == 4
        assert device.memory.allocate(1, device.links).address == 4096, "the buffer must be free again"


def test_operands_and_tables_lie_where_the_descriptors_say():
    with Scripted({}) as device:
        attend(device, [head(0), head(1)], contexts=2, watchdog_cycles=99)
        (batch,) = device.seen
        assert (batch.contexts, batch.watchdog_cycles) == (2, 99)
        for one, wanted in zip(batch.descriptors, (head(0), head(1)), strict=True):
            for address, array in ((one.q_address, wanted.q), (one.v_mean_address, wanted.v_mean),
                                   (one.token_table_address, wanted.token_table),
                                   (one.index_table_address, wanted.index_table)):  # fmt: skip
                assert address % 8 == 0
                assert bytes(device.memory.view(address, array.nbytes)) == array.tobytes()


def test_only_heads_with_a_wrong_reference_are_repeated():
    script = {(0, 1): Fault.REFERENCE_LOW, (1, 1): Fault.MISDIRECTED | Fault.REFERENCE_HIGH, (2, 1): BOTH, (2, 2): BOTH}
    with Scripted(script) as device:
        done = attend(device, [head(n) for n in range(4)])
        assert [one.completion.faults for one in done.heads] == [0, Fault.MISDIRECTED | Fault.REFERENCE_HIGH, 0, 0]
        assert [[one.page_tag.sequence for one in batch.descriptors] for batch in device.seen] == [
            [0, 1, 2, 3],
            [0, 2],
            [2],
        ]
        again = device.seen[1].descriptors[0]
        assert again.mode == Mode.PAGE | Mode.REFERENCE and again.reference == (5, -6)


def test_repeats_end():
    with Scripted({(0, n): Fault.REFERENCE_HIGH for n in range(1, 9)}) as device:
        done = attend(device, [head(0)], repeats=2)
        assert len(done.batches) == 3
        with pytest.raises(DeviceError, match="without fault, not REFERENCE_HIGH: repeat the head with the returned"):
            done.heads[0].value()


def test_another_kernel_is_refused():
    with open_device("host:update-tiny") as device, pytest.raises(CommandError, match="not to host:update-tiny"):
        attend(device, [head(0)])


def test_a_head_whose_last_line_would_be_anothers_is_refused():
    """Three query heads of 682 entries: 2,046 of a share of 2,048, but in 513 lines of four, not 512."""
    one = head(1)
    tokens = replace(one.descriptor, mode=Mode(0), tokens=682, group=3, local_window=0)
    crowding = Head(tokens, np.zeros((3, 12), np.float16), one.v_mean, one.token_table, one.index_table)
    build = CONFIGS["attend-pynq-z2"]
    assert tokens.overfills(build, 4) and not tokens.fits(build, 4) and most_contexts(build, [crowding]) == 2
    assert not replace(tokens, tokens=680).overfills(build, 4) and not tokens.overfills(build, 2)
    assert not replace(tokens, mode=Mode.DENSE | Mode.REFERENCE).overfills(build, 4)
    device = Scripted({})
    device.identity = replace(device.identity, config=build)
    with pytest.raises(CommandError, match=r"contexts must be fewer, as most_contexts says, .* not 4"):
        attend(device, [one, crowding])
    assert not device.seen


@pytest.mark.parametrize("name", ["q", "v_mean"])
def test_shapes(name):
    with pytest.raises(ShapeError, match=f"{name} must have the shape"):
        replace(head(0), **{name: np.zeros((3, 4), np.float16)})
