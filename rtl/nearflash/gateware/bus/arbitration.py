"""Common parts of arbiters: one register between the masters' address channels and the bus, and queues of owners."""

from collections.abc import Sequence

from amaranth import Cat, Module, Signal
from amaranth.lib import wiring

from nearflash.gateware.bus.transfer import Burst, drive_address
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["owner_queue", "share_address"]


def owner_queue(count: int, max_outstanding: int) -> StreamQueue:
    """Queue of the owners, one of `count` masters each, of `max_outstanding` bursts; the oldest one is in a register.

    Raises ValueError for a parameter below 2.
    """
    if count < 2:
        raise ValueError(f"count must be at least 2 masters, not {count!r}")
    if max_outstanding < 2:
        raise ValueError(f"max_outstanding must be at least 2 bursts, not {max_outstanding!r}")
    return StreamQueue(range(count), max_outstanding, memory="block")


def share_address(
    m: Module,
    bus: wiring.PureInterface,
    ports: Sequence[wiring.PureInterface],
    prefix: str,
    owners: Sequence[StreamQueue],
) -> None:
    """Join the address channels `prefix` ("ar" or "aw") of the masters `ports` to that of `bus`, by round robin.

    Each burst's owner goes into all queues `owners`.
    """
    count = len(ports)
    valid, ready = f"{prefix}valid", f"{prefix}ready"
    bus_valid, bus_ready = getattr(bus, valid), getattr(bus, ready)
    burst = Signal(Burst)
    chosen, last = Signal(range(count)), Signal(range(count))
    room, requested = Signal(), Signal()

    # The master after the last one that had its turn, of those that request.
    with m.Switch(last):
        for before in range(count):
            with m.Case(before):
                for step in reversed(range(1, count + 1)):
                    with m.If(getattr(ports[(before + step) % count], valid)):
                        m.d.comb += chosen.eq((before + step) % count)
    m.d.comb += [
        room.eq((bus_ready | ~bus_valid) & Cat(queue.i.ready for queue in owners).all()),
        requested.eq(room & Cat(getattr(port, valid) for port in ports).any()),
    ]
    for queue in owners:
        m.d.comb += [queue.i.payload.eq(chosen), queue.i.valid.eq(requested)]

    drive_address(m, bus, prefix, burst)
    with m.If(bus_ready):
        m.d.sync += bus_valid.eq(0)
    with m.If(requested):
        m.d.sync += [bus_valid.eq(1), last.eq(chosen)]
    for index, port in enumerate(ports):
        mine = chosen == index
        m.d.comb += getattr(port, ready).eq(room & mine)
        with m.If(requested & mine):
            address, length = getattr(port, f"{prefix}addr"), getattr(port, f"{prefix}len")
            m.d.sync += [burst.address.eq(address), burst.length.eq(length)]
