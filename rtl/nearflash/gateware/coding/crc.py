"""CRC32C of whole beats, a beat a cycle.

Contract: a beat is taken in every cycle with `enable`, its byte 0 first; `first` marks the first beat of a message and
starts again. No reset is needed.

Timing: `o` has the CRC of all beats up to a beat LATENCY cycles later; one beat a cycle; back-pressure: none.
Numerics: equals nearflash.model.coding.crc.crc32c to the bit.
Source: RFC 3720, 12.1.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.crc import CRC_POLYNOMIAL
from nearflash.gateware.coding import linear
from nearflash.gateware.fp.pipeline import wire

__all__ = ["Crc32c"]

_ONE_STEP = [CRC_POLYNOMIAL, *(1 << k for k in range(31))]
"""One bit further: the register shifts down, its bit 0 comes back as the polynomial."""


def _columns(width: int) -> list[int]:
    """Compute what each bit of a beat, added to the register in its low 32, leaves there after `width` steps."""
    columns = [CRC_POLYNOMIAL]  # of the last bit: one step
    while len(columns) < width:
        columns.append(linear.product(_ONE_STEP, columns[-1:])[0])
    return columns[::-1]


class Crc32c(wiring.Component):
    """CRC32C of messages.

    Parameters
    ----------
    width_bits : of a beat, a multiple of 8, more than 32.

    Members
    -------
    enable : In, whether there is a beat.
    first : In, whether it is the first one of a message.
    data : In, `width_bits`.
    o : Out, the CRC as it is stored (little endian), 32 bits.
    """

    #: Cycles from a beat to the CRC of all beats up to it.
    LATENCY = 1

    def __init__(self, width_bits: int = 64) -> None:
        self.width_bits = width_bits
        super().__init__({"enable": In(1), "first": In(1), "data": In(width_bits), "o": Out(32)})

    def elaborate(self, platform: object) -> Module:
        """A beat's first 32 bits meet the register; the sum goes through all steps of a beat at once."""
        m = Module()
        crc = Signal(32, reset_less=True)
        before = Mux(self.first, (1 << 32) - 1, crc)
        mixed = wire(m, Cat(self.data[:32] ^ before, self.data[32:]))
        with m.If(self.enable):
            m.d.sync += crc.eq(linear.apply(m, _columns(self.width_bits), mixed, 32))
        m.d.comb += self.o.eq(~crc)
        return m
