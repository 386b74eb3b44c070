"""CRC32C, 64 bits a cycle.

Contract: a beat is taken in every cycle with `enable`, its byte 0 first; `first` marks the first beat of a message and
starts anew. No reset is needed.

Timing: `o` has the CRC of all beats up to a beat LATENCY cycles later; one beat a cycle; back-pressure: none.
Numerics: equals nearflash.model.nfc.crc.crc32c to the bit.
Source: RFC 3720, 12.1.
"""

from amaranth import Cat, Module, Mux, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.crc import CRC_POLYNOMIAL
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nfc import linear

__all__ = ["Crc32c"]

_ONE_STEP = [CRC_POLYNOMIAL, *(1 << k for k in range(31))]
"""One bit further: the register shifts down, its bit 0 comes back as the polynomial."""


def _columns() -> list[int]:
    """What each bit of a beat, the register added to its low half, leaves in the register after 64 steps."""
    return [linear.power(_ONE_STEP, 64 - bit)[0] for bit in range(64)]


class Crc32c(wiring.Component):
    """CRC32C of messages of whole 64-bit beats.

    Members
    -------
    enable : In, whether there is a beat.
    first : In, whether it is the first one of a message.
    data : In, 64 bits.
    o : Out, the CRC as it is stored (little endian), 32 bits.
    """

    #: Cycles from a beat to the CRC of all beats up to it.
    LATENCY = 1

    enable: In(1)
    first: In(1)
    data: In(64)
    o: Out(32)

    def elaborate(self, platform: object) -> Module:
        """A beat's low half meets the register; the sum goes through 64 steps at once."""
        m = Module()
        crc = Signal(32, reset_less=True)
        before = Mux(self.first, (1 << 32) - 1, crc)
        mixed = wire(m, Cat(self.data[:32] ^ before, self.data[32:]))
        with m.If(self.enable):
            m.d.sync += crc.eq(linear.apply(m, _columns(), mixed, 32))
        m.d.comb += self.o.eq(~crc)
        return m
