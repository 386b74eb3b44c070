"""Bench of the write arbiter: a 32-bit bus, two masters, 2 bursts under way."""

from amaranth.hdl import Cat, Mux, Signal

from nearflash.gateware.bus.write_arbiter import WriteArbiter
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import OwnerLog

__all__ = ["write_arbiter"]

_BYTES = 4  # of a beat
_OUTSTANDING = 2


def write_arbiter() -> Bench:
    """Two masters: each burst goes out once, W has the data of its owners in order, answers go to their owners."""
    dut = WriteArbiter(2, 8 * _BYTES, max_outstanding=_OUTSTANDING)
    bench = Bench(dut)
    bus = dut.bus
    answer = bench.free(1, "bvalid")
    bench.m.d.comb += [
        bus.awready.eq(bench.free(1, "awready")),
        bus.wready.eq(bench.free(1, "wready")),
        bus.bvalid.eq(answer),
        bus.bresp.eq(bench.free(2, "bresp")),
    ]
    taken, data = [], []
    for index, port in enumerate(dut.port):
        asks, burst = bench.free(1, f"asks_{index}"), bench.free(72, f"burst_{index}")
        waits = bench.past(asks & ~port.awready, f"waits_{index}")
        bench.assume(~waits | (asks & (burst == bench.past(burst, f"burst_{index}_past"))))
        sends, beat = bench.free(1, f"sends_{index}"), bench.free(9 * _BYTES + 1, f"beat_{index}")
        bench.m.d.comb += [
            port.awvalid.eq(asks),
            Cat(port.awaddr, port.awlen).eq(burst),
            port.wvalid.eq(sends),
            Cat(port.wdata, port.wstrb, port.wlast).eq(beat),
            port.bready.eq(bench.free(1, f"bready_{index}")),
        ]
        taken.append((asks & port.awready, burst))
        data.append((sends, beat))
    begun = taken[0][0] | taken[1][0]
    pending = bench.past(begun, "begun") | bench.past(bus.awvalid & ~bus.awready, "bus_waits")
    expected = Signal(72)
    with bench.m.If(begun):
        bench.m.d.sync += expected.eq(Mux(taken[1][0], taken[1][1], taken[0][1]))
    sent, answered = bus.wvalid & bus.wready & bus.wlast, answer & bus.bready
    writing = OwnerLog(bench, begun, taken[1][0], sent, _OUTSTANDING, "writing")
    waiting = OwnerLog(bench, begun, taken[1][0], answered, _OUTSTANDING, "waiting")
    # An answer comes for a burst whose address and data have gone.
    bench.assume(~answer | (waiting.count > writing.count) & (waiting.count > bus.awvalid))

    bench.prove("one_at_a_time", ~(taken[0][0] & taken[1][0]))
    bench.prove("bus_asks_what_was_taken", bus.awvalid == pending)
    bench.prove("same_burst", ~bus.awvalid | (Cat(bus.awaddr, bus.awlen) == expected))
    bench.prove("outstanding_kept", (waiting.count <= _OUTSTANDING) & (writing.count <= waiting.count))
    for index, port in enumerate(dut.port):
        sends, beat = data[index]
        mine = (writing.count != 0) & (writing.first == index)
        bench.prove(f"data_of_owner_{index}", ~mine | (bus.wvalid == sends))
        bench.prove(f"data_same_{index}", ~mine | (Cat(bus.wdata, bus.wstrb, bus.wlast) == beat))
        bench.prove(f"data_taken_{index}", port.wready == (mine & bus.wready))
        asked = (waiting.count != 0) & (waiting.first == index)
        bench.prove(f"answer_to_owner_{index}", port.bvalid == (answer & asked))
        bench.prove(f"answer_taken_{index}", ~asked | (bus.bready == port.bready))
        bench.prove(f"answer_same_{index}", port.bresp == bus.bresp)
        other, passed = taken[1 - index][0], Signal(name=f"passed_{index}")
        bench.m.d.sync += passed.eq(port.awvalid & ~taken[index][0] & (passed | other))
        bench.prove(f"fair_{index}", ~(passed & other))
    bench.prove("no_data_without_burst", ~bus.wvalid | (writing.count != 0))
    bench.prove("not_after_reset", ~bench.was_reset | ~(bus.awvalid | bus.wvalid))
    bench.prove("inner_data", bench.probe("data.level", 2) == writing.count)
    bench.prove("inner_answers", bench.probe("answers.level", 2) == waiting.count)
    bench.no_paths += [(bus.awready, bus.awvalid), (bus.wready, bus.wvalid), (bus.awready, bus.wvalid)]
    bench.cover("two_owners", (writing.count == 2) & sent & ~writing.first)
    bench.cover("both_answered", answered & waiting.first & bench.past(answered & ~waiting.first, "answered_first"))
    return bench
