"""Score arbiter: the channels' approximate scores on their one way to the selection.

Contract: a channel that has begun a token group keeps the output until the group's last query head has ended, so that
groups stay whole (ScoreRow). Between groups round robin. A context's broadcast comes before its scores.

Timing: latency LATENCY cycle; one row a cycle; back-pressure: yes. o comes from registers.
"""

from amaranth import Cat, Module, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import HEAD_BITS, ContextRecord, ScoreRow

__all__ = ["ScoreArbiter"]


class ScoreArbiter(wiring.Component):
    """Merges the score rows of all channels.

    Parameters
    ----------
    channels : inputs, at least 1. contexts : contexts, a power of two.

    Members
    -------
    i_context : In, {valid, record}: broadcast.
    i : array of `channels` In streams of ScoreRow. o : Out stream of ScoreRow.

    Raises
    ------
    ValueError : `channels` is less than 1.
    """

    #: Cycles from a row on an input to `o` when no other waits.
    LATENCY = 1

    def __init__(self, channels: int, contexts: int) -> None:
        if channels < 1:
            raise ValueError(f"channels must be at least 1, not {channels!r}")
        self.channels, self.contexts = channels, contexts
        super().__init__(
            {
                "i_context": In(data.StructLayout({"valid": 1, "record": ContextRecord})),
                "i": In(stream.Signature(ScoreRow)).array(channels),
                "o": Out(stream.Signature(ScoreRow)),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Choose, register, and lock from a group's first row to its last one."""
        m = Module()
        m.submodules.groups = groups = Memory(shape=HEAD_BITS, depth=self.contexts, init=[])
        write = groups.write_port()
        record = self.i_context.record
        chosen, last, locked = Signal(range(self.channels)), Signal(range(self.channels)), Signal()
        row, room, moves, ends = Signal(ScoreRow), Signal(), Signal(), Signal()

        m.d.comb += chosen.eq(last)
        with m.If(~locked):
            with m.Switch(last):
                for before in range(self.channels):
                    with m.Case(before):
                        for step in reversed(range(1, self.channels + 1)):
                            with m.If(self.i[(before + step) % self.channels].valid):
                                m.d.comb += chosen.eq((before + step) % self.channels)
        valid = Cat(i.valid for i in self.i).bit_select(chosen, 1)
        m.d.comb += [
            write.addr.eq(record.context),
            write.data.eq(record.group - 1),
            write.en.eq(self.i_context.valid),
            room.eq(self.o.ready | ~self.o.valid),
            moves.eq(room & valid),
        ]
        row_ends = [self._ends(m, groups, i.payload) for i in self.i]  # known before a channel is chosen
        with m.Switch(chosen):
            for index, i in enumerate(self.i):
                with m.Case(index):
                    m.d.comb += [row.eq(i.payload), i.ready.eq(room), ends.eq(row_ends[index])]
        with m.If(room):
            m.d.sync += [self.o.valid.eq(valid), self.o.payload.eq(row)]
        with m.If(moves):
            m.d.sync += [last.eq(chosen), locked.eq(~ends)]
        return m

    @staticmethod
    def _ends(m: Module, groups: Memory, row: data.View) -> Value:
        """Whether the row is its group's last one."""
        read = groups.read_port(domain="comb")
        m.d.comb += read.addr.eq(row.context)
        return row.last & (row.head == read.data)
