"""Sequencer: runs one update command from `start` to `done`.

Contract: a command that is empty, misaligned or more than the build can do (or, in state format mx8, not of whole
blocks) ends at once, nothing read or written; any other goes to Fetch and Store and ends when both are idle. The first
bus error becomes status and fault address: reads before writes, ports in order; without one, a fault of the gradient
stream does, with the stream's address. Status and fault address stand still from `done` to the next `start`.

Timing: `done` comes at the earliest 2 cycles after `start`; back-pressure: waits for Fetch and Store.
"""

from collections.abc import Sequence
from typing import Any

from amaranth import Cat, Module, Mux
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.kernel.commands import CopyFormat, Status
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers.state import BLOCK_PARAMS, StateFormat
from nearflash.abi.registers import SPLIT_BIT
from nearflash.abi.topk import StreamFault
from nearflash.gateware.bus.command import await_start, command_members, finish, reject, report
from nearflash.gateware.bus.transfer import BusError
from nearflash.gateware.update.fetch import INPUTS, STATES, FetchCommand
from nearflash.gateware.update.state_form import per_format
from nearflash.gateware.update.store import OUTPUTS, StoreCommand

__all__ = ["Sequencer"]


class Sequencer(wiring.Component):
    """Control of the update kernel.

    Parameters
    ----------
    config : build configuration.
    arguments : layout of the kernel's read-write registers; `values` has it.

    Members
    -------
    values : In, arguments; must stay as they are until `done`.
    start : In, pulse. done : Out, pulse.
    fetch : Out stream of FetchCommand. store : Out stream of StoreCommand.
    stream_fault : In, StreamFault of Fetch.
    fetch_idle, store_idle : In. fetch_error, store_error : In, arrays of BusError in the order of the memory ports.
    clear : Out, forgets the bus errors of the command before.
    status : Out, Status code. fault_address : Out, byte address of the first fault.
    """

    def __init__(self, config: UpdateConfig, arguments: Any) -> None:
        self.config = config
        super().__init__(
            {
                **command_members(arguments),
                "fetch": Out(stream.Signature(FetchCommand)),
                "store": Out(stream.Signature(StoreCommand)),
                "stream_fault": In(StreamFault),
                "fetch_idle": In(1),
                "store_idle": In(1),
                "fetch_error": In(BusError).array(len(INPUTS)),
                "store_error": In(BusError).array(len(OUTPUTS)),
                "clear": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Arguments to commands; then the states of a command."""
        m = Module()
        values = self.values
        copy = values.program.copy_format != CopyFormat.NONE
        m.d.comb += [
            self.fetch.payload.params.eq(values.params),
            self.fetch.payload.stream_bytes.eq(values.gradient_bytes),
            self.fetch.payload.topk.eq(values.program.topk),
            self.store.payload.params.eq(values.params),
            self.store.payload.copy.eq(copy),
            self.store.payload.dither.step.eq(values.step),
            self.store.payload.dither.first_param.eq(values.first_param),
        ]
        reads = [values[f"{name}_address"] for name in INPUTS]
        writes = [values[f"{name}_out_address"] for name in OUTPUTS]
        for target, addresses in ((self.fetch, reads), (self.store, writes)):
            for index, address in enumerate(addresses):
                m.d.comb += target.payload.address[index].eq(address)
            m.d.comb += target.payload.form.eq(values.program.state_format)
        for index, name in enumerate(STATES):
            m.d.comb += [
                self.fetch.payload.scale_address[index].eq(values[f"{name}_scale_address"]),
                self.store.payload.scale_address[index].eq(values[f"{name}_scale_out_address"]),
            ]

        with m.FSM():
            with m.State("WAIT-START"):
                # Errors of the last command are in status by now.
                m.d.comb += self.clear.eq(1)
                await_start(m, self)
            with m.State("CHECK"):
                self._check(m, copy)
            # Store first: from then on it is not idle before the last response, whatever Fetch has done.
            with m.State("COMMAND-STORE"):
                m.d.comb += self.store.valid.eq(1)
                with m.If(self.store.ready):
                    m.next = "COMMAND-FETCH"
            with m.State("COMMAND-FETCH"):
                m.d.comb += self.fetch.valid.eq(1)
                with m.If(self.fetch.ready):
                    m.next = "WAIT-IDLE"
            with m.State("WAIT-IDLE"):
                with m.If(self.fetch_idle & self.store_idle):
                    m.next = "REPORT"
            with m.State("REPORT"):
                status = Status.STREAM_HEADER - StreamFault.HEADER + self.stream_fault
                # First, so that a bus error, which explains a broken stream, wins.
                report(m, self, self.stream_fault != StreamFault.NONE, status, values.g_address)
                self._report(m, [(error, Status.READ_ERROR) for error in self.fetch_error])
                self._report(m, [(error, Status.WRITE_ERROR) for error in self.store_error], after_reads=True)
                m.next = "FINISH"
            with m.State("FINISH"):
                finish(m, self)
        return m

    def _check(self, m: Module, copy: Any) -> None:
        values, config = self.values, self.config
        m.next = "COMMAND-STORE"
        inputs = [(name, values[f"{name}_address"]) for name in INPUTS]
        outputs = [(name, values[f"{name}_out_address"]) for name in (*OUTPUTS[1:], OUTPUTS[0])]
        if len(config.masters) > 1:
            inputs.append(("rest", values.rest_address))
            outputs.append(("rest", values.rest_out_address))
        # Reversed, as the last statement wins: the first array in order is reported.
        for name, address in reversed(inputs + outputs):
            wrong = self._check_alignment(name, address) & (copy if name == "copy" else 1)
            reject(m, self, wrong, Status.MISALIGNED, address)
        program = values.program
        unsupported = program.state_format > len(config.state_formats) - 1
        if "topk" not in config.gradients:
            unsupported |= program.topk
        if "mx8" in config.state_formats:
            part = (values.params % BLOCK_PARAMS != 0) | (values.first_param % BLOCK_PARAMS != 0)
            unsupported |= (program.state_format == StateFormat.MX8.code) & part
        # After the addresses, and EMPTY after this: later reasons win.
        reject(m, self, unsupported, Status.UNSUPPORTED)
        reject(m, self, values.params == 0, Status.EMPTY)

    def _check_alignment(self, name: str, address: Any) -> Any:
        """Narrow state, and halves of masters, need multiples of what as many parameters take as a port's width of fp32
        words.
        """
        offset_bits = (self.config.port_bytes - 1).bit_length()
        form, off = self.values.program.state_format, [address[: offset_bits - n].any() for n in range(3)]
        if name in ("p", "rest") and len(self.config.masters) > 1:
            split = self.values.program.as_value()[SPLIT_BIT]
            return Mux(split, off[1], off[0] if name == "p" else 0)
        if name not in STATES or len(self.config.state_formats) == 1:
            return off[0]
        return per_format(form, *off)

    def _report(self, m: Module, faults: Sequence[tuple[Any, Status]], *, after_reads: bool = False) -> None:
        # Reads go before writes in the report.
        unseen = ~Cat(error.seen for error in self.fetch_error).any() if after_reads else 1
        for error, status in reversed(faults):
            report(m, self, error.seen & unseen, status, error.address)
