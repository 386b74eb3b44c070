"""Common parts of the kernels' tops: members beside the data ports, and wires from the register block to the rest."""

from collections.abc import Mapping
from typing import Any

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.fields import RegisterMap
from nearflash.gateware.bus.axi import AxiLiteSignature
from nearflash.gateware.bus.counters import Counters
from nearflash.gateware.bus.registers import RegisterFile

__all__ = ["connect_control", "connect_counters", "control_members"]

_COUNTER_BITS = 48


def control_members(registers: RegisterMap, ports: Mapping[str, Any]) -> dict[str, Any]:
    """Members of a kernel with these registers and data `ports`, as the tops' docstrings say."""
    return {
        "s_axi_control": In(AxiLiteSignature((registers.size_bytes - 1).bit_length())),
        **ports,
        "interrupt": Out(1),
        "git_revision": In(32),
    }


def connect_control(m: Module, kernel: Any, registers: RegisterFile, sequencer: Any) -> None:
    """Bus, identity and interrupt of a kernel; values, start, done, status and fault address of its sequencer."""
    status = registers.status
    wiring.connect(m, wiring.flipped(kernel.s_axi_control), registers.bus)
    m.d.comb += [
        kernel.interrupt.eq(registers.interrupt),
        sequencer.values.eq(registers.values),
        sequencer.start.eq(registers.start),
        registers.done.eq(sequencer.done),
        status.status.eq(sequencer.status),
        status.fault_address.eq(sequencer.fault_address),
        status.git_revision.eq(kernel.git_revision),
        status.config_digest.eq(kernel.config.digest64),
    ]


def connect_counters(
    m: Module, registers: RegisterFile, sequencer: Any, events: Mapping[str, Any], wide: Mapping[str, int]
) -> None:
    """Count `events` from start to done into the status registers of their names.

    wide: bits of what an event may add in a cycle, where it is more than one.
    """
    m.submodules.counters = counters = Counters({name: wide.get(name, 1) for name in events}, _COUNTER_BITS)
    m.d.comb += [counters.start.eq(registers.start), counters.done.eq(sequencer.done)]
    for name, event in events.items():
        m.d.comb += [counters.events[name].eq(event), registers.status[name].eq(counters.latched[name])]
