"""Common parts of readers and writers: the layouts of commands, bursts and errors, and the logic around them."""

from amaranth import Cat, Const, Module, Mux, Value
from amaranth.hdl import ValueLike
from amaranth.lib import data, wiring

from nearflash.gateware.bus.axi import ADDRESS_BITS, CACHE_NORMAL, AxiBurst, AxiResponse

__all__ = ["Burst", "BusError", "TransferCommand", "drive_address", "latch_error", "subtract_beats"]


class TransferCommand(data.Struct):
    """Move `beats` data beats from or to the byte address `address`, a multiple of the beat's bytes."""

    address: ADDRESS_BITS
    beats: 32


class Burst(data.Struct):
    """One AXI4 burst of `length` + 1 beats at the byte address `address`."""

    address: ADDRESS_BITS
    length: 8


class BusError(data.Struct):
    """First error response since the last clear: whether there was one, its code, and the burst's byte address."""

    seen: 1
    response: AxiResponse
    address: ADDRESS_BITS


def drive_address(m: Module, bus: wiring.PureInterface, prefix: str, burst: data.View) -> None:
    """Drive the payload of the address channel `prefix` ("ar" or "aw") of `bus` for a `Burst` of full beats."""
    beat_bits = len(bus.rdata if prefix == "ar" else bus.wdata)
    values = {
        "addr": burst.address,
        "len": burst.length,
        "size": (beat_bits // 8).bit_length() - 1,
        "burst": AxiBurst.INCR,
        "cache": CACHE_NORMAL,
    }
    m.d.comb += [getattr(bus, prefix + name).eq(value) for name, value in values.items()]


def latch_error(m: Module, error: data.View, clear: Value, valid: Value, response: Value, address: ValueLike) -> None:
    """Keep in the `BusError` register `error` the first SLVERR or DECERR since `clear`, with its burst's address."""
    with m.If(clear):
        m.d.sync += error.seen.eq(0)
    with m.Elif(valid & response[1] & ~error.seen):
        m.d.sync += [error.seen.eq(1), error.response.eq(response), error.address.eq(address)]


def subtract_beats(beats: Value, claimed: Value, burst: data.View, added: Value) -> Value:
    """`beats`, less those of a `Burst` that is `claimed` in this cycle, plus one `added`; as wide as `beats`.

    One carry chain: b - (length + 1) is b + ~length, and its carry input is the beat that is added.
    """
    claim = Mux(claimed, ~Cat(burst.length, Const(0, len(beats)))[: len(beats)], 0)
    return (Cat(1, beats) + Cat(added, claim))[1 : 1 + len(beats)]
