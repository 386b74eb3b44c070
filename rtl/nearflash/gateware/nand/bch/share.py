"""Share of one corrector: several channels take turns, a codeword at a time.

    i[0] ─┐                           ┌─► o[0]
    i[…] ─┴─► turn ──► Corrector ──►──┴─► o[…]
               └── whose, in order ────┘

Contract: each channel's answers come in the order of its codewords. A channel that asks is served after at most one
codeword of every other channel. Reset drops the codewords inside.

Timing: that of the Corrector; one idle cycle before a turn; back-pressure: yes. A channel that does not take its answer
holds up the others.
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS, BCH_ERRORS
from nearflash.gateware.nand.bch.corrector import Corrector
from nearflash.gateware.nand.bch.key_equation import SYNDROMES_A_BEAT
from nearflash.gateware.nand.codeword import ErrorPosition
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["CorrectorShare"]

_BEATS = BCH_ERRORS // SYNDROMES_A_BEAT
_UNDER_WAY = 4


class CorrectorShare(wiring.Component):
    """One Corrector for `channels` channels.

    Parameters
    ----------
    channels : 1 to 8.

    Members
    -------
    i : array of In streams of four syndromes.
    o : array of Out streams of ErrorPosition.

    Raises
    ------
    ValueError : `channels` outside its range.
    """

    def __init__(self, channels: int) -> None:
        if not 1 <= channels <= 8:
            raise ValueError(f"channels must be 1 to 8, not {channels!r}")
        self.channels = channels
        super().__init__(
            {
                "i": In(stream.Signature(BCH_BITS * SYNDROMES_A_BEAT)).array(channels),
                "o": Out(stream.Signature(ErrorPosition)).array(channels),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """The next turn goes to the first asking channel behind the last one served."""
        m = Module()
        m.submodules.corrector = corrector = Corrector()
        m.submodules.order = order = StreamQueue(range(max(self.channels, 2)), _UNDER_WAY)
        turn, beat, serving = Signal(range(self.channels)), Signal(range(_BEATS)), Signal()
        asking = Cat(i.valid for i in self.i)

        with m.If(~serving):
            with m.Switch(turn):
                for last in range(self.channels):
                    with m.Case(last):
                        # The nearest one behind `last` stands last, and wins.
                        for distance in range(self.channels, 0, -1):
                            candidate = (last + distance) % self.channels
                            with m.If(self.i[candidate].valid):
                                m.d.sync += turn.eq(candidate)
            # Room in `order` first: an answer without its channel would be lost.
            m.d.sync += serving.eq(asking.any() & order.i.ready)
        with m.Switch(turn):
            for channel, i in enumerate(self.i):
                with m.Case(channel):
                    m.d.comb += [
                        corrector.i.payload.eq(i.payload),
                        corrector.i.valid.eq(i.valid & serving),
                        i.ready.eq(corrector.i.ready & serving),
                    ]
        moves = Signal()
        m.d.comb += [
            moves.eq(corrector.i.valid & corrector.i.ready),
            order.i.payload.eq(turn),
            order.i.valid.eq(moves & (beat == _BEATS - 1)),
        ]
        with m.If(moves):
            m.d.sync += beat.eq(beat + 1)
            with m.If(beat == _BEATS - 1):
                m.d.sync += serving.eq(0)

        for channel, o in enumerate(self.o):
            mine = order.o.valid & (order.o.payload == channel)
            m.d.comb += [o.payload.eq(corrector.o.payload), o.valid.eq(corrector.o.valid & mine)]
            with m.If(mine):
                m.d.comb += corrector.o.ready.eq(o.ready)
        # Answers come in the order of the questions; the last item of one ends its turn.
        m.d.comb += order.o.ready.eq(corrector.o.valid & corrector.o.ready & corrector.o.payload.last)
        return m
