"""Properties of streams and of the AXI channels, to be attached to a harness.

Payloads: the stream elements never look at the payload, so one bit shows the order of items. At most one item carries
a 1; when it comes out in its place, and only there, then nothing was lost, doubled, invented or overtaken, whatever the
payload (Wolper, "Expressing interesting properties of programs in propositional temporal logic", 1986).
"""

from typing import Any

from amaranth.hdl import Array, Cat, Mux, Signal, Value

from nearflash.verify.proofs.harness import ProofHarness

__all__ = ["BurstLog", "OwnerLog", "accept", "check_address", "check_order", "check_source", "moves", "offer"]


def moves(stream: Any) -> Any:
    """Whether an item moves in this cycle."""
    return stream.valid & stream.ready


def offer(harness: ProofHarness, stream: Any, name: str = "i") -> None:
    """Drive an input stream of the component with any items, held until they are taken."""
    payload = Value.cast(stream.payload)
    valid = harness.free(1, f"{name}_valid")
    item = harness.free(len(payload), f"{name}_payload")
    harness.m.d.comb += [stream.valid.eq(valid), payload.eq(item)]
    waits = harness.past(valid & ~stream.ready, f"{name}_waits")
    harness.assume(~waits | (valid & (item == harness.past(item, f"{name}_payload_past"))))


def accept(harness: ProofHarness, stream: Any, name: str = "o") -> None:
    """Drive the ready of an output stream of the component in any way."""
    harness.m.d.comb += stream.ready.eq(harness.free(1, f"{name}_ready"))


def check_source(harness: ProofHarness, stream: Any, name: str = "o") -> None:
    """The component keeps an offered item until it is taken; a reset takes back every offer."""
    payload = Value.cast(stream.payload)
    waits = harness.past(stream.valid & ~stream.ready, f"{name}_waits")
    before = harness.past(payload, f"{name}_payload_past")
    harness.prove(f"{name}_valid_until_ready", ~waits | stream.valid)
    harness.prove(f"{name}_payload_stable_until_ready", ~waits | (payload == before))
    harness.no_paths.append((stream.ready, stream.valid))
    harness.cover(f"{name}_waits_then_moves", waits & moves(stream))


def check_order(harness: ProofHarness, i: Any, o: Any, capacity: int) -> Signal:
    """The items of `i` leave by `o` in order, none lost, none invented, `capacity` inside at most.

    Both payloads are one bit. Returns the count of items inside, for further properties.
    """
    m = harness.m
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

    harness.assume(~(i.valid & Value.cast(i.payload)[0] & marked))
    harness.prove("capacity_kept", inside <= capacity)
    harness.prove("nothing_invented", ~o.valid | (inside != 0))
    harness.prove("order_kept", ~o.valid | (Value.cast(o.payload)[0] == (tracked & (ahead == 0))))
    harness.prove("empty_after_reset", ~harness.was_reset | ~o.valid)
    harness.cover("full", inside == capacity)
    harness.cover("marked_item_leaves", tracked & (ahead == 0) & leaves)
    return inside


def check_address(harness: ProofHarness, bus: Any, prefix: str, block_beats: int) -> None:
    """Address channel `prefix` ("ar" or "aw") of 32-bit beats: stable bursts of full beats that cross no block."""
    valid, ready, address, length, size, burst = (
        getattr(bus, prefix + name) for name in ("valid", "ready", "addr", "len", "size", "burst")
    )
    waits = harness.past(valid & ~ready, f"{prefix}_waits")
    payload = Cat(address, length)
    harness.prove(f"{prefix}_valid_until_ready", ~waits | valid)
    harness.prove(f"{prefix}_stable_until_ready", ~waits | (payload == harness.past(payload, f"{prefix}_past")))
    harness.prove(
        f"{prefix}_no_crossing", ~valid | (address[2:][: block_beats.bit_length() - 1] + length < block_beats)
    )
    harness.prove(f"{prefix}_full_aligned_beats", ~valid | ((address[:2] == 0) & (size == 2) & (burst == 1)))
    harness.prove(f"{prefix}_not_after_reset", ~harness.was_reset | ~valid)
    harness.no_paths.append((ready, valid))


class BurstLog:
    """Bursts that were begun and not finished, and how far the first one of them is.

    `count` bursts are open; `index` beats of the first one have moved, of its `length` + 1; `at_last` tells that its
    next beat is its last; `beats_left` is what all of them still want.
    """

    def __init__(self, harness: ProofHarness, begins: Any, length: Any, beat: Any, most: int, name: str) -> None:
        m = harness.m
        lengths = Array(Signal(8, name=f"{name}_length{n}") for n in range(most + 1))
        self.count = Signal(range(most + 2), name=f"{name}_count")
        self.index, self.length = Signal(8, name=f"{name}_index"), lengths[0]
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

    `waits` tells whether one of them was begun before the cycle before: the queue of owners shows the first one then.
    owner: that of the burst that begins. most: bursts that may be open.
    """

    def __init__(self, harness: ProofHarness, begins: Any, owner: Any, ends: Any, most: int, name: str) -> None:
        m = harness.m
        owners = Array(Signal(name=f"{name}_{n}") for n in range(most + 2))
        self.count = Signal(range(most + 2), name=f"{name}_count")
        self.first, self.second = owners[0], owners[1]
        self.waits = Signal(name=f"{name}_waits")
        m.d.sync += [self.count.eq(self.count + begins - ends), self.waits.eq(self.count > ends)]
        with m.If(ends):
            m.d.sync += [owners[n].eq(owners[n + 1]) for n in range(most)]
        with m.If(begins):
            m.d.sync += owners[self.count - ends].eq(owner)


def buffer_harness(dut: Any, capacity: int) -> tuple[ProofHarness, Signal]:
    """Order, capacity, and no path through in either direction."""
    harness = ProofHarness(dut)
    offer(harness, dut.i)
    accept(harness, dut.o)
    check_source(harness, dut.o)
    harness.no_paths += [(dut.o.ready, dut.i.ready), (dut.i.valid, dut.o.valid)]
    return harness, check_order(harness, dut.i, dut.o, capacity)


def count_beats(harness: ProofHarness, source: Any, count: int) -> Any:
    """Number of the beat that `source` shows in its codeword of `count` beats."""
    beat = Signal(range(count), name="beat")
    with harness.m.If(moves(source)):
        harness.m.d.sync += beat.eq(Mux(beat == count - 1, 0, beat + 1))
    return beat
