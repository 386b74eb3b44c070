"""Gradient source: beats of a memory port to groups of gradients, dense or from a Top-K stream.

    i ─┬─► Narrow ──────────────────────────────┬─► o
       └─► Narrow, 64-bit words ─► TopKExpander ─┘

Contract: a command of n parameters gives ceil(n / lanes) groups, the final one with `last`. Of a Top-K stream it takes
exactly the stream's beats, whatever they hold; with a fault the rest of the groups hold zeros (see TopKExpander).

Timing: latency that of Narrow, or of TopKExpander behind it; one group a cycle; back-pressure: yes.
"""

from typing import Any

from amaranth import Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.topk import WORD_BYTES, StreamFault
from nearflash.gateware.gradients.topk import TopKExpander
from nearflash.gateware.stream.gearbox import Narrow

__all__ = ["GradientCommand", "GradientSource"]

_WORD_BITS = 8 * WORD_BYTES


class GradientCommand(data.Struct):
    """Gradients of `params` parameters in `groups` groups; with `topk`, from a stream of `stream_bytes` bytes."""

    groups: 32
    params: 32
    stream_bytes: 32
    topk: 1


class GradientSource(wiring.Component):
    """Gradients for the join.

    Parameters
    ----------
    config : build configuration; one without Top-K gradients has no expander.

    Members
    -------
    i_command : In stream of GradientCommand; in a build with Top-K, taken when the one before is done.
    i : In stream of unsigned(config.port_bits).
    o : Out stream of struct {data: 32 bits a lane, last: 1}.
    fault : Out, StreamFault; stands until the next command.
    idle : Out, no stream is being expanded.
    """

    def __init__(self, config: UpdateConfig) -> None:
        self.config = config
        self._group_bits = FP32.bits * config.lanes
        group = data.StructLayout({"data": self._group_bits, "last": 1})
        super().__init__(
            {
                "i_command": In(stream.Signature(GradientCommand)),
                "i": In(stream.Signature(config.port_bits)),
                "o": Out(stream.Signature(group)),
                "fault": Out(StreamFault),
                "idle": Out(1, init=1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The dense way, and beside it the other one."""
        m = Module()
        m.submodules.dense = dense = Narrow(self._group_bits, self.config.port_bits // self._group_bits)
        command = self.i_command
        m.d.comb += dense.i_count.payload.eq(command.payload.groups)
        if "topk" in self.config.gradients:
            self._topk(m, dense)
            return m
        wiring.connect(m, wiring.flipped(self.i), dense.i)
        wiring.connect(m, dense.o, wiring.flipped(self.o))
        m.d.comb += [dense.i_count.valid.eq(command.valid), command.ready.eq(dense.i_count.ready)]
        return m

    def _topk(self, m: Module, dense: Narrow) -> None:
        """The last command's kind says which way beats and groups go, until its last group has gone.

        Not busy and the expander idle, both gearboxes are empty: their ready, which hangs on that of `o`, is not asked.
        """
        m.submodules.expander = expander = TopKExpander(self.config.lanes)
        command, topk, taken, busy = self.i_command, Signal(), Signal(), Signal()
        words, count = self._words(m, expander)
        m.d.comb += [
            command.ready.eq(~busy & expander.i_command.ready),
            taken.eq(command.valid & command.ready),
            dense.i_count.valid.eq(taken & ~command.payload.topk),
            expander.i_command.valid.eq(taken & command.payload.topk),
            expander.i_command.payload.params.eq(command.payload.params),
            expander.i_command.payload.stream_bytes.eq(command.payload.stream_bytes),
            count.valid.eq(taken & command.payload.topk),
            count.payload.eq(command.payload.stream_bytes >> (WORD_BYTES.bit_length() - 1)),
            # Of a dense command the expander's fault is an old one.
            self.fault.eq(Mux(topk, expander.fault, StreamFault.NONE)),
            self.idle.eq(expander.idle),
            self.i.ready.eq(Mux(topk, words.ready, dense.i.ready)),
            self.o.valid.eq(Mux(topk, expander.o.valid, dense.o.valid)),
            self.o.payload.eq(Mux(topk, expander.o.payload.as_value(), dense.o.payload.as_value())),
        ]
        with m.If(self.o.valid & self.o.ready & self.o.payload.last):
            m.d.sync += busy.eq(0)
        with m.If(taken):
            # A command without groups has no last one that would end it.
            m.d.sync += [topk.eq(command.payload.topk), busy.eq(command.payload.groups != 0)]
        for way, chosen in ((words, topk), (dense.i, ~topk)):
            m.d.comb += [way.valid.eq(self.i.valid & chosen), way.payload.eq(self.i.payload)]
        for way, chosen in ((expander.o, topk), (dense.o, ~topk)):
            m.d.comb += way.ready.eq(self.o.ready & chosen)

    def _words(self, m: Module, expander: TopKExpander) -> tuple[Any, Any]:
        """Route beats of a stream, and count its words."""
        ratio = self.config.port_bits // _WORD_BITS
        if ratio == 1:
            count = stream.Signature(32).flip().create(path=("count",))
            m.d.comb += count.ready.eq(1)
            return expander.i, count
        m.submodules.words = words = Narrow(_WORD_BITS, ratio)
        m.d.comb += [
            expander.i.payload.eq(words.o.payload.data),
            expander.i.valid.eq(words.o.valid),
            words.o.ready.eq(expander.i.ready),
        ]
        return words.i, words.i_count
