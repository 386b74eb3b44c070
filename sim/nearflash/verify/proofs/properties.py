"""Properties of streams and of the AXI channels, to be attached to a bench.

Payloads: the stream elements never look at the payload, so one bit shows the order of items. At most one item carries
a 1; when it comes out in its place, and only there, then nothing was lost, doubled, invented or overtaken, whatever the
payload (Wolper, "Expressing interesting properties of programs in propositional temporal logic", 1986).
"""

from typing import Any

from amaranth.hdl import Array, Cat, Mux, Signal, Value

from nearflash.verify.proofs.proof import Bench

__all__ = ["BurstLog", "OwnerLog", "accept", "check_address", "check_order", "check_source", "moves", "offer"]


def moves(stream: Any) -> Any:
    """Whether an item moves in this cycle."""
    return stream.valid & stream.ready


def offer(bench: Bench, stream: Any, name: str = "i") -> None:
    """Drive an input stream of the component with any items, held until they are taken."""
    payload = Value.cast(stream.payload)
    valid = bench.free(1, f"{name}_valid")
    item = bench.free(len(payload), f"{name}_payload")
    bench.m.d.comb += [stream.valid.eq(valid), payload.eq(item)]
    waits = bench.past(valid & ~stream.ready, f"{name}_waits")
    bench.assume(~waits | (valid & (item == bench.past(item, f"{name}_payload_past"))))


def accept(bench: Bench, stream: Any, name: str = "o") -> None:
    """Drive the ready of an output stream of the component in any way."""
    bench.m.d.comb += stream.ready.eq(bench.free(1, f"{name}_ready"))


def check_source(bench: Bench, stream: Any, name: str = "o") -> None:
    """The component keeps an offered item until it is taken; a reset takes back every offer."""
    payload = Value.cast(stream.payload)
    waits = bench.past(stream.valid & ~stream.ready, f"{name}_waits")
    before = bench.past(payload, f"{name}_payload_past")
    bench.prove(f"{name}_valid_until_ready", ~waits | stream.valid)
    bench.prove(f"{name}_payload_stable_until_ready", ~waits | (payload == before))
    bench.no_paths.append((stream.ready, stream.valid))
    bench.cover(f"{name}_waits_then_moves", waits & moves(stream))


def check_order(bench: Bench, i: Any, o: Any, capacity: int) -> Signal:
    """The items of `i` leave by `o` in order, none lost, none invented, `capacity` inside at most.

    Both payloads are one bit. Returns the count of items inside, for further properties.
    """
    m = bench.m
    inside = Signal(range(capacity + 2))  # one more than allowed, so that a violation shows
    ahead = Signal(range(capacity + 2))  # items that leave before the marked one
    marked, tracked = Signal(), Signal()  # an item was marked; it is inside
    enters, leaves = moves(i), moves(o)
    mark = enters & Value.cast(i.payload)[0]
    m.d.sync += [inside.eq(inside + enters - leaves), marked.eq(marked | mark)]
    with m.If(mark):
        m.d.sync += [tracked.eq(1), ahead.eq(inside - leaves)]
    with m.Elif(tracked & leaves):
        m.d.sync += [tracked.eq(ahead != 0), ahead.eq(Mux(ahead == 0, 0, ahead - 1))]

    bench.assume(~(i.valid & Value.cast(i.payload)[0] & marked))
    bench.prove("capacity_kept", inside <= capacity)
    bench.prove("nothing_invented", ~o.valid | (inside != 0))
    bench.prove("order_kept", ~o.valid | (Value.cast(o.payload)[0] == (tracked & (ahead == 0))))
    bench.prove("empty_after_reset", ~bench.was_reset | ~o.valid)
    bench.cover("full", inside == capacity)
    bench.cover("marked_item_leaves", tracked & (ahead == 0) & leaves)
    return inside


def check_address(bench: Bench, bus: Any, prefix: str, block_beats: int) -> None:
    """Address channel `prefix` ("ar" or "aw") of 32-bit beats: stable bursts of full beats that cross no block."""
    valid, ready, address, length, size, burst = (
        getattr(bus, prefix + name) for name in ("valid", "ready", "addr", "len", "size", "burst")
    )
    waits = bench.past(valid & ~ready, f"{prefix}_waits")
    payload = Cat(address, length)
    bench.prove(f"{prefix}_valid_until_ready", ~waits | valid)
    bench.prove(f"{prefix}_stable_until_ready", ~waits | (payload == bench.past(payload, f"{prefix}_past")))
    bench.prove(f"{prefix}_no_crossing", ~valid | (address[2:][: block_beats.bit_length() - 1] + length < block_beats))
    bench.prove(f"{prefix}_full_aligned_beats", ~valid | ((address[:2] == 0) & (size == 2) & (burst == 1)))
    bench.prove(f"{prefix}_not_after_reset", ~bench.was_reset | ~valid)
    bench.no_paths.append((ready, valid))


class BurstLog:
    """Bursts that were begun and not finished, and how far the first one of them is.

    `count` bursts are open; `index` beats of the first one have moved; `at_last` tells that its next beat is its last;
    `beats_left` is what all of them still want.
    """

    def __init__(self, bench: Bench, begins: Any, length: Any, beat: Any, most: int, name: str) -> None:
        m = bench.m
        lengths = Array(Signal(8, name=f"{name}_length{n}") for n in range(most + 1))
        self.count = Signal(range(most + 2), name=f"{name}_count")
        self.index = Signal(8, name=f"{name}_index")
        self.at_last = Signal(name=f"{name}_at_last")
        self.beats_left = sum(Mux(self.count > n, lengths[n] + 1, 0) for n in range(most + 1)) - self.index
        ends = beat & self.at_last
        m.d.comb += self.at_last.eq(self.index == lengths[0])
        with m.If(beat):
            m.d.sync += self.index.eq(Mux(self.at_last, 0, self.index + 1))
        with m.If(ends):
            m.d.sync += [lengths[n].eq(lengths[n + 1]) for n in range(most)]
        with m.If(begins):
            m.d.sync += lengths[self.count - ends].eq(length)
        m.d.sync += self.count.eq(self.count + begins - ends)


class OwnerLog:
    """Who of two owns each burst that was begun and has not ended: `count` of them, and the `first` and `second` one's.

    owner: that of the burst that begins. most: bursts that may be open.
    """

    def __init__(self, bench: Bench, begins: Any, owner: Any, ends: Any, most: int, name: str) -> None:
        m = bench.m
        owners = Array(Signal(name=f"{name}_{n}") for n in range(most + 2))
        self.count = Signal(range(most + 2), name=f"{name}_count")
        self.first, self.second = owners[0], owners[1]
        m.d.sync += self.count.eq(self.count + begins - ends)
        with m.If(ends):
            m.d.sync += [owners[n].eq(owners[n + 1]) for n in range(most)]
        with m.If(begins):
            m.d.sync += owners[self.count - ends].eq(owner)
