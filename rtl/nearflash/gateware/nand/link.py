"""The NAND link: the 64-bit boundary between a channel's controller and its PHY, and the raw codewords behind it.

    NandController ── cycles ──► PHY (a black box) ── DQ, DQS, ALE, CLE, CE# … ──► luns
                   ◄── read ───
                   ─── write ──►

The PHY takes a bus cycle (`ready`) in the clock in which that cycle ends on the bus, so the controller counts its
waits from there. A READ cycle stands for `beats` of 64 bits, of which the PHY puts the first on `read` when the bus has
it; it is taken after its last beat has moved. A WRITE cycle takes its beats from `write`, which is not looked at
otherwise. Data go at the rate of the link; where a side stalls, the strobe pauses. A status READ is one beat with the
status in its low byte.
"""

from amaranth import Value
from amaranth.lib import data, enum, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import RAW_BYTES

__all__ = ["RAW_BEATS", "BusCycle", "CycleKind", "NandLinkSignature", "RawBeat", "codeword_beats"]

RAW_BEATS = RAW_BYTES // 8
"""Beats of a raw codeword."""
BEATS_BITS = 12
"""Width of a beat count: a page of 32 codewords has 2,208."""


def codeword_beats(codewords: Value) -> Value:
    """Beats of so many raw codewords, by shifts: a multiplication would take a DSP block."""
    return sum((codewords << place for place in range(1, RAW_BEATS.bit_length()) if RAW_BEATS >> place & 1), codewords)


class CycleKind(enum.Enum, shape=2):
    """Action of the bus."""

    COMMAND = 0
    ADDRESS = 1
    READ = 2
    WRITE = 3


class BusCycle(data.Struct):
    """A command or address cycle, or a burst of data."""

    lun: 8
    """Which chip enable is low."""
    kind: CycleKind
    byte: 8
    """COMMAND, ADDRESS."""
    beats: BEATS_BITS
    """READ, WRITE: beats of 64 bits, at least 1."""


class RawBeat(data.Struct):
    """A beat of a raw codeword; all but `data`, `first` and `last` are constant over the codeword."""

    data: 64
    first: 1
    last: 1
    number: 6
    """Number of the codeword in its request."""
    place: 5
    """Its place in the page: it starts at column 552·place."""
    lun: 8
    row: 32
    """Where the page lies; V's lun is K's XOR 1."""
    final: 1
    """The last codeword of its request."""
    failed: 1
    """The lun never became ready: the data are zero and mean nothing."""


NandLinkSignature = wiring.Signature(
    {
        "cycles": Out(stream.Signature(BusCycle)),
        "read": In(stream.Signature(64)),
        "write": Out(stream.Signature(64)),
    }
)
"""The controller's side."""
