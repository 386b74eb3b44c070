"""The checks and tickets that every backend shares."""

import random
from collections import Counter
from contextlib import nullcontext
from itertools import combinations, product
from time import process_time

import pytest

from nearflash.abi.errors import AddressError, AlignmentError, CommandError, DeviceError, WaitTimeoutError
from nearflash.abi.kernel.commands import Completion, CopyFormat, UpdateCommand
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep
from nearflash.device.base import Identity, LinkBytes
from nearflash.device.checked import CheckedDevice, check_ranges, port_beats, shares_memory
from nearflash.device.memory import SimulatedMemory

ADAM = AdamStep(lr=1e-3, step=1)
N = 1024
SLOT = 4 * N


class Scripted(CheckedDevice):
    """Ends each command as the script says: with a completion or by raising."""

    def __init__(self, *script):
        super().__init__(Identity("scripted", CONFIGS["update-tiny"], 0, 1, 0), SimulatedMemory(1 << 20))
        self.script, self.started, self.aborts = list(script), [], 0

    @classmethod
    def open(cls, config):
        raise NotImplementedError

    def _start(self, command):
        self.started.append(command)

    def _finish(self, timeout_s):
        end = self.script.pop(0)
        if isinstance(end, Exception):
            raise end
        return Completion(end)

    def _abort(self):
        self.aborts += 1


def command(base: int, params: int = N, **changes) -> UpdateCommand:
    """Slots of g, p, m, v and the new p, m, v, copy from `base` on; changes: `copy`, or addresses such as `v_out`."""
    streams = ("g", "p", "m", "v", "p_out", "m_out", "v_out", "copy_out")
    at = {name: base + i * SLOT for i, name in enumerate(streams)} | changes
    inputs, outputs = {name: at[name] for name in streams[:4]}, {name[:-4]: at[name] for name in streams[4:]}
    return UpdateCommand(ADAM, params, inputs, outputs, at.get("copy", CopyFormat.NONE))


def test_a_command_outside_the_allocated_buffers_never_starts():
    device = Scripted()
    one, two = device.allocate(8 * SLOT), device.allocate(8 * SLOT)
    base = one.address
    device.free(two)
    bad = {
        "v read": dict(v=base + 8 * SLOT),  # freed
        "g read": dict(g=base - SLOT),
        "p write": dict(p_out=base + 7 * SLOT + 8),  # its last 8 bytes
        "m write": dict(m_out=1 << 50),
        "copy write": dict(copy_out=0, copy=CopyFormat.BF16),
    }
    for name, changes in bad.items():
        with pytest.raises(AddressError, match=rf"{name} range must .* 1048576 bytes of memory, not \[0x"):
            device.submit(command(base, **changes))
    device.submit(command(base, copy_out=0))
    assert len(device.started) == 1


def test_a_range_over_two_buffers_is_refused():
    device = Scripted()
    buffers = [device.allocate(SLOT) for _ in range(9)]
    assert buffers[1].address == buffers[0].address + SLOT
    device.submit(command(buffers[0].address))
    with pytest.raises(AddressError, match="g read"):
        device.submit(command(buffers[0].address + 8))


def test_outputs_may_replace_inputs_but_not_overlap_them():
    device = Scripted({})
    base = device.allocate(9 * SLOT).address
    in_place = dict(p_out=base + SLOT, m_out=base + 2 * SLOT, v_out=base + 3 * SLOT)
    device.submit(command(base, **in_place))
    for changes, first, second in (
        (dict(p_out=base + SLOT + 8), "p write", "p read"),
        (dict(m_out=base + 2 * SLOT - 8), "m write", "p read"),
        (dict(v_out=base + 4 * SLOT), "p write", "v write"),
        (dict(copy_out=base, copy=CopyFormat.FP16), "copy write", "g read"),
        (dict(copy_out=base + 7 * SLOT - 2048, copy=CopyFormat.FP16), "v write", "copy write"),
    ):
        with pytest.raises(AddressError, match=rf"{first} range must be apart from the {second} range .* not \[0x"):
            device.submit(command(base, **changes))
    device.submit(command(base, p_out=base))  # over the gradients: read before they are written
    assert len(device.started) == 2


class Ranges:
    """A command of ranges and nothing else."""

    def __init__(self, reads, writes):
        self._reads, self._writes = dict(enumerate(reads)), dict(enumerate(writes))

    def reads(self):
        return self._reads

    def writes(self):
        return self._writes


def test_any_overlap_is_found_and_nothing_else():
    """Against the definition: every write with every other range."""
    rng, memory = random.Random(1), SimulatedMemory(1 << 16)
    buffers = [memory.allocate(4096, LinkBytes()) for _ in range(3)]
    base, found = buffers[0].address, Counter()
    for _ in range(2000):
        reads, writes = ([(base + rng.randrange(40), rng.randint(1, 9)) for _ in range(rng.randint(0, most))]
                         for most in (4, 3))  # fmt: skip
        writes += rng.sample(reads, min(len(reads), rng.randint(0, 1)))
        pairs = [(one, other) for one, other in product(writes, reads) if one != other] + [*combinations(writes, 2)]
        wrong = any(one[0] < sum(other) and other[0] < sum(one) for one, other in pairs)
        with pytest.raises(AddressError, match="must be apart") if wrong else nullcontext():
            check_ranges(Ranges(reads, writes), buffers, 1 << 16)
        found[wrong] += 1
    assert min(found.values()) > 200 and len(found) == 2


def test_commands_share_memory_where_one_writes_what_the_other_uses():
    rng, found = random.Random(2), Counter()
    for _ in range(2000):
        one, other = (
            Ranges(*([(rng.randrange(60), rng.randint(1, 9)) for _ in range(rng.randint(0, 2))] for _ in range(2)))
            for _ in range(2)
        )
        ranges = [used().values() for command in (one, other) for used in (command.reads, command.writes)]
        uses = [{byte for at, size in each for byte in range(at, at + size)} for each in ranges]
        shared = bool(uses[1] & (uses[2] | uses[3]) or uses[0] & uses[3])
        assert shares_memory(one, other) is shares_memory(other, one) is shared
        found[shared] += 1
    assert min(found.values()) > 200 and len(found) == 2


def test_thousands_of_ranges_are_checked_in_an_instant():
    memory = SimulatedMemory(1 << 24)
    buffers = [memory.allocate(4096, LinkBytes()) for _ in range(2000)]
    halves = [[(buffer.address + offset, 2048) for buffer in buffers] for offset in (0, 2048)]
    spent = []
    for _ in range(3):  # other threads of the process count, too, and come and go
        start = process_time()
        check_ranges(Ranges(*halves), buffers, 1 << 24)
        spent.append(process_time() - start)
    assert min(spent) < 0.5, "4,000 ranges took seconds when each was compared with each"


def test_contract_checks_come_first():
    device = Scripted()
    base = device.allocate(8 * SLOT).address
    with pytest.raises(CommandError, match=r"params must be between 1 and .*, not 0"):
        device.submit(command(base, params=0))
    with pytest.raises(AlignmentError, match="g read address must be a multiple of 8 bytes"):
        device.submit(command(base, g=base + 4))
    assert not device.started


def test_tickets_end_in_any_order():
    device = Scripted({"params_done": 1}, DeviceError("broken"), {"params_done": 3})
    base = device.allocate(8 * SLOT).address
    tickets = [device.submit(command(base)) for _ in range(3)]
    assert device.wait(tickets[2]).counters == {"params_done": 3}
    assert device.wait(tickets[0]).counters == {"params_done": 1}
    with pytest.raises(DeviceError, match="broken"):
        device.wait(tickets[1])
    for ticket in (tickets[0], 99):
        with pytest.raises(CommandError, match=f"not yet waited for, not {ticket}"):
            device.wait(ticket)


def test_a_command_that_timed_out_still_runs():
    device = Scripted(WaitTimeoutError("late"), {}, WaitTimeoutError("late"))
    base = device.allocate(8 * SLOT).address
    ticket = device.submit(command(base))
    with pytest.raises(WaitTimeoutError):
        device.wait(ticket, timeout_s=0.1)
    assert device.wait(ticket).counters == {}
    ticket = device.submit(command(base))
    device.reset()
    with pytest.raises(CommandError, match="ticket must be one"):
        device.wait(ticket)


def test_closed_devices_refuse():
    device = Scripted()
    base = device.allocate(8 * SLOT).address
    with device:
        pass
    device.close()
    assert device.aborts == 1
    with pytest.raises(DeviceError, match="scripted:update-tiny must be open, not closed"):
        device.submit(command(base))
    with pytest.raises(DeviceError, match="must be open"):
        device.allocate(1)


def test_port_beats_round_up_per_stream():
    one = command(0, params=17, copy=CopyFormat.FP16)
    assert port_beats(one, 64) == {"read_beats": 4 * 2, "write_beats": 3 * 2 + 1}
