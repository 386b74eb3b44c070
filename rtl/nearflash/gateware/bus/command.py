"""Command control: what the sequencers of the kernels share between `start` and `done`.

    WAIT-START ─► CHECK ─┬─► the kernel's own states ─► REPORT ─┬─► FINISH ─► WAIT-START
                         └─► rejected ──────────────────────────┘

Each function is called within a state of the sequencer's FSM. The page mover does not use it: it runs operations of one
command, side by side, and has no start, status or done of its own.

Timing: `done` comes at the earliest 2 cycles after `start`. Status and fault address stand still from `done` to the
next `start`.
"""

from typing import Any

from amaranth import Module
from amaranth.hdl import ValueLike
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.commands import Status

__all__ = ["await_start", "command_members", "finish", "reject", "report"]


def command_members(arguments: Any) -> dict[str, Any]:
    """Members of a sequencer, beside its kernel's own: `arguments` is the layout of the read-write registers.

    values : In, arguments; must stay as they are until `done`. start : In, pulse. done : Out, pulse.
    status : Out, Status code. fault_address : Out, byte address of the first fault, 64 bits.
    """
    return {
        "values": In(arguments),
        "start": In(1),
        "done": Out(1),
        "status": Out(Status, init=Status.OK),
        "fault_address": Out(64),
    }


def await_start(m: Module, sequencer: Any) -> None:
    """State WAIT-START: at `start` the status is OK until something else is found."""
    with m.If(sequencer.start):
        m.d.sync += [sequencer.status.eq(Status.OK), sequencer.fault_address.eq(0)]
        m.next = "CHECK"


def report(m: Module, sequencer: Any, found: ValueLike, status: ValueLike, address: ValueLike = 0) -> None:
    """Report this status and byte address where `found`. Priority: of several reports in a cycle the last call wins."""
    with m.If(found):
        m.d.sync += [sequencer.status.eq(status), sequencer.fault_address.eq(address)]


def reject(m: Module, sequencer: Any, wrong: ValueLike, status: ValueLike, address: ValueLike = 0) -> None:
    """State CHECK: where `wrong`, report and end the command at once. Call it after `m.next` of a good command."""
    report(m, sequencer, wrong, status, address)
    with m.If(wrong):
        m.next = "FINISH"


def finish(m: Module, sequencer: Any) -> None:
    """State FINISH."""
    m.d.comb += sequencer.done.eq(1)
    m.next = "WAIT-START"
