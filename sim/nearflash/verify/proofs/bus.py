"""Benches of the bus components: a 32-bit bus, bursts of up to 4 beats, 2 bursts under way."""

from amaranth.hdl import Array, Cat, Const, Mux, Signal, Value
from amaranth.lib.wiring import In

from nearflash.abi.fields import Access, Register, RegisterMap
from nearflash.abi.registers import UPDATE
from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import AxiResponse
from nearflash.gateware.bus.control import KernelControl
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.gateware.bus.split import BurstSplitter
from nearflash.gateware.bus.write import BurstWriter
from nearflash.verify.proofs.proof import Bench
from nearflash.verify.proofs.properties import BurstLog, OwnerLog, accept, check_address, check_source, moves, offer

__all__ = ["arbiter", "control", "reader", "registers", "splitter", "writer"]

_BEATS, _BYTES = 4, 4  # of a burst, of a beat
_OUTSTANDING = 2
_QUEUE_BEATS = 6


def splitter() -> Bench:
    """The bursts of a command continue each other, stay inside a block, and add up to the command."""
    dut = BurstSplitter(8 * _BYTES, _BEATS * _BYTES)
    bench = Bench(dut)
    offer(bench, dut.i)
    accept(bench, dut.o)
    check_source(bench, dut.o)
    burst = dut.o.payload
    left, address = Signal(32), Signal(64)  # beats and place that the command still wants
    fresh = dut.o.valid & ~bench.past(dut.o.valid & ~dut.o.ready, "waited")
    beats = Mux(fresh, burst.length + 1, 0)
    bench.m.d.sync += [left.eq(left - beats), address.eq(address + beats * _BYTES)]
    with bench.m.If(moves(dut.i)):
        bench.m.d.sync += [left.eq(dut.i.payload.beats), address.eq(dut.i.payload.address & ~(_BYTES - 1))]

    bench.prove("bursts_continue_each_other", ~fresh | (burst.address == address))
    bench.prove("burst_within_command", beats <= left)
    bench.prove("burst_within_block", ~dut.o.valid | (burst.address[2:4] + burst.length < _BEATS))
    bench.prove("next_command_after_the_last_beat", ~dut.i.ready | (beats == left))
    bench.prove("idle_when_all_is_done", dut.idle == ((left == 0) & ~dut.o.valid))
    bench.prove("empty_after_reset", ~bench.was_reset | ~dut.o.valid)
    bench.cover("three_bursts", fresh & (left == 1) & (burst.address[:8] == 0x20))

    inner_left = bench.probe("left_beats", 32)
    block, offset = bench.probe("block", 60), bench.probe("offset", 2)
    bench.prove("inner_alignment", address[:2] == 0)
    bench.prove("inner_left", inner_left == left - beats)
    bench.prove("inner_address", (inner_left == 0) | (Cat(offset, block) == (address + beats * _BYTES)[2:64]))
    return bench


def reader() -> Bench:
    """Bursts are legal and have room; the answers find their places; errors are kept."""
    dut = BurstReader(
        8 * _BYTES, max_outstanding=_OUTSTANDING, max_burst_bytes=_BEATS * _BYTES, queue_beats=_QUEUE_BEATS
    )
    bench = Bench(dut)
    bus = dut.bus
    offer(bench, dut.i_command, "command")
    accept(bench, dut.o)
    answer = bench.free(1, "rvalid")
    last, response = bench.free(1, "rlast"), bench.free(2, "rresp")
    bench.m.d.comb += [
        bus.arready.eq(bench.free(1, "arready")),
        bus.rvalid.eq(answer),
        bus.rdata.eq(bench.free(32, "rdata")),
        bus.rlast.eq(last),
        bus.rresp.eq(response),
        dut.clear.eq(bench.free(1, "clear")),
    ]
    check_address(bench, bus, "ar", _BEATS)
    asked = BurstLog(bench, bus.arvalid & bus.arready, bus.arlen, answer & bus.rready, _OUTSTANDING, "asked")
    bench.assume(~answer | ((asked.count != 0) & (last == asked.at_last)))

    bench.prove("outstanding_kept", asked.count <= _OUTSTANDING)
    bench.prove("room_for_every_answer", ~answer | bus.rready)
    bench.prove("idle_means_nothing_left", ~dut.idle | ((asked.count == 0) & ~dut.o.valid & ~bus.arvalid))
    seen, kept = Signal(), Signal(2)
    with bench.m.If(dut.clear):
        bench.m.d.sync += seen.eq(0)
    with bench.m.Elif(answer & response[1] & ~seen):
        bench.m.d.sync += [seen.eq(1), kept.eq(response)]
    bench.prove("first_error_kept", (dut.error.seen == seen) & (~seen | (Value.cast(dut.error.response) == kept)))
    bench.cover("two_bursts_under_way", asked.count == _OUTSTANDING)
    bench.cover("idle_after_a_burst", dut.idle & bench.past(moves(dut.o), "moved"))
    return bench


def arbiter() -> Bench:
    """Two masters: each burst goes out once and is answered to its owner; none waits for two of the other."""
    dut = ReadArbiter(2, 8 * _BYTES, max_outstanding=_OUTSTANDING)
    bench = Bench(dut)
    bus = dut.bus
    answer, last = bench.free(1, "rvalid"), bench.free(1, "rlast")
    bench.m.d.comb += [
        bus.arready.eq(bench.free(1, "arready")),
        bus.rvalid.eq(answer),
        bus.rdata.eq(bench.free(32, "rdata")),
        bus.rlast.eq(last),
    ]
    taken = []
    for index, port in enumerate(dut.port):
        asks, burst = bench.free(1, f"asks_{index}"), bench.free(72, f"burst_{index}")
        waits = bench.past(asks & ~port.arready, f"waits_{index}")
        bench.assume(~waits | (asks & (burst == bench.past(burst, f"burst_{index}_past"))))
        bench.m.d.comb += [
            port.arvalid.eq(asks),
            Cat(port.araddr, port.arlen).eq(burst),
            port.rready.eq(bench.free(1, f"rready_{index}")),
        ]
        taken.append((asks & port.arready, burst, waits))
    begun = taken[0][0] | taken[1][0]
    pending = bench.past(begun, "begun") | bench.past(bus.arvalid & ~bus.arready, "bus_waits")
    expected = Signal(72)
    ends = answer & bus.rready & last
    with bench.m.If(begun):
        bench.m.d.sync += expected.eq(Mux(taken[1][0], taken[1][1], taken[0][1]))
    owners = OwnerLog(bench, begun, taken[1][0], ends, _OUTSTANDING, "owner")
    bench.assume(~answer | (owners.count > bus.arvalid))

    bench.prove("one_at_a_time", ~(taken[0][0] & taken[1][0]))
    bench.prove("bus_asks_what_was_taken", bus.arvalid == pending)
    bench.prove("same_burst", ~bus.arvalid | (Cat(bus.araddr, bus.arlen) == expected))
    bench.prove("outstanding_kept", owners.count <= _OUTSTANDING)
    for index, port in enumerate(dut.port):
        bench.prove(f"answer_to_owner_{index}", port.rvalid == (answer & (owners.first == index)))
        bench.prove(f"answer_same_{index}", (port.rdata == bus.rdata) & (port.rlast == bus.rlast))
        other, passed = taken[1 - index][0], Signal(name=f"passed_{index}")
        bench.m.d.sync += passed.eq(port.arvalid & ~taken[index][0] & (passed | other))
        bench.prove(f"fair_{index}", ~(passed & other))
    bench.prove("not_after_reset", ~bench.was_reset | ~bus.arvalid)
    bench.prove("inner_level", bench.probe("owners.level", 2) == owners.count)
    bench.no_paths.append((bus.arready, bus.arvalid))
    bench.cover("two_owners", (owners.count == 2) & (owners.first != owners.second) & ends)
    return bench


def writer() -> Bench:
    """Bursts are legal and complete; W gives AWLEN + 1 beats without a pause; answers are counted."""
    dut = BurstWriter(
        8 * _BYTES, max_outstanding=_OUTSTANDING, max_burst_bytes=_BEATS * _BYTES, queue_beats=_QUEUE_BEATS
    )
    bench = Bench(dut)
    bus = dut.bus
    offer(bench, dut.i_command, "command")
    offer(bench, dut.i)
    answer, response = bench.free(1, "bvalid"), bench.free(2, "bresp")
    bench.m.d.comb += [
        bus.awready.eq(bench.free(1, "awready")),
        bus.wready.eq(bench.free(1, "wready")),
        bus.bvalid.eq(answer),
        bus.bresp.eq(response),
    ]
    check_address(bench, bus, "aw", _BEATS)
    fresh = bus.awvalid & ~bench.past(bus.awvalid & ~bus.awready, "waited")
    sent = bus.wvalid & bus.wready
    data = BurstLog(bench, fresh, bus.awlen, sent, _OUTSTANDING, "data")
    begun, written = Signal(range(_OUTSTANDING + 2)), Signal(range(_OUTSTANDING + 2))  # without an answer
    bench.m.d.sync += [
        begun.eq(begun + (bus.awvalid & bus.awready) - answer),
        written.eq(written + (sent & bus.wlast) - answer),
    ]
    bench.assume(~answer | ((begun != 0) & (written != 0)))

    bench.prove("outstanding_kept", begun <= _OUTSTANDING)
    bench.prove("no_data_without_burst", ~bus.wvalid | (data.count != 0))
    bench.prove("last_is_the_last", ~bus.wvalid | (bus.wlast == data.at_last))
    bench.prove("no_pause_inside_a_burst", (data.index == 0) | bus.wvalid)
    waits = bench.past(bus.wvalid & ~bus.wready, "w_waits")
    beat = Cat(bus.wdata, bus.wstrb, bus.wlast)
    bench.prove("w_stable_until_ready", ~waits | (bus.wvalid & (beat == bench.past(beat, "w_past"))))
    bench.prove("answers_are_taken", ~answer | bus.bready)
    bench.prove("idle_means_nothing_left", ~dut.idle | ((begun == 0) & (data.count == 0) & ~bus.awvalid))
    bench.no_paths += [(bus.awready, bus.wvalid), (bus.wready, bus.wvalid)]

    # Invariants, so that the engine need not find them: how the component's counts follow from what was seen outside.
    waited = bench.past(bus.awvalid & ~bus.awready, "aw_waited")
    due = Signal(range(4 * _QUEUE_BEATS))  # beats of open bursts that W still has to give
    bench.m.d.sync += due.eq(due + Mux(fresh, bus.awlen + 1, 0) - sent)
    served, unclaimed = bench.probe("fork.served", 2), bench.probe("unclaimed_beats", 4)
    level, waiting = bench.probe("data.level", 3), Mux(bus.awvalid, bus.awlen + 1, 0)
    bench.prove("inner_fork", ~served[0] & (served[1] == waited) & (~waited | bus.awvalid))
    bench.prove("inner_open", bench.probe("bursts.level", 2) == begun)
    bench.prove("inner_lengths", bench.probe("lengths.level", 2) == data.count)
    bench.prove("inner_index", bench.probe("index", 8) == data.index)
    bench.prove("inner_written", written + data.count == begun + waited)
    bench.prove("inner_due", due == data.beats_left)
    bench.prove("inner_level", level + waiting == unclaimed + due + Mux(fresh, waiting, 0))
    bench.cover("two_bursts_under_way", (begun == _OUTSTANDING) & (written == 0))
    bench.cover("data_before_address", sent & waits & bus.awvalid)
    return bench


def registers() -> Bench:
    """Every access has one answer; a register changes by its own writes only, byte by byte."""
    words = [register for register in UPDATE if register.access is Access.CONTROL]
    words += [Register("value", 0x10, 32, Access.RW, ""), Register("state", 0x14, 32, Access.RO, "")]
    dut = RegisterFile(RegisterMap("small", 0x20, tuple(words)))
    bench = Bench(dut)
    bus = dut.bus
    for path, member, _ in bus.signature.flatten(bus):
        if member.flow is In:  # of the bus as seen by its slave
            bench.m.d.comb += getattr(bus, path[0]).eq(bench.free(member.shape, path[0]))
    state = bench.free(32, "state")
    bench.m.d.comb += [dut.done.eq(bench.free(1, "done")), dut.status.state.eq(state)]

    writes, reads = bus.awvalid & bus.awready, bus.arvalid & bus.arready
    owed_b, owed_r = Signal(), Signal()
    bench.m.d.sync += [owed_b.eq(writes | (owed_b & ~bus.bready)), owed_r.eq(reads | (owed_r & ~bus.rready))]
    bench.prove("address_and_data_together", writes == (bus.wvalid & bus.wready))
    bench.prove("one_answer_per_write", (bus.bvalid == owed_b) & ~(owed_b & ~bus.bready & writes))
    bench.prove("one_answer_per_read", (bus.rvalid == owed_r) & ~(owed_r & ~bus.rready & reads))
    for name, waits, answer in (
        ("b", bus.bvalid & ~bus.bready, bus.bresp),
        ("r", bus.rvalid & ~bus.rready, Cat(bus.rresp, bus.rdata)),
    ):
        stable = answer == bench.past(answer, f"{name}_past")
        bench.prove(f"{name}_stable_until_ready", ~bench.past(waits, f"{name}_waits") | stable)

    value, index = Signal(32), bus.awaddr[2:]
    with bench.m.If(writes & (index == 4)):
        for byte, strobe in enumerate(bus.wstrb):
            with bench.m.If(strobe):
                bench.m.d.sync += value.word_select(byte, 8).eq(bus.wdata.word_select(byte, 8))
    bench.prove("value_is_what_was_written", dut.values.value == value)
    refused = bench.past(writes & (index > 4), "refused")
    bench.prove("refused_writes_answer_an_error", ~refused | (bus.bresp == AxiResponse.SLVERR))
    asked = bench.past(Mux(reads, bus.araddr[2:], 0), "asked")
    bench.prove("state_is_read", (asked != 5) | (bus.rdata == bench.past(state, "state_past")))
    bench.prove("value_is_read", (asked != 4) | (bus.rdata == bench.past(dut.values.value, "value_past")))
    bench.no_paths += [(bus.bready, bus.bvalid), (bus.rready, bus.rvalid), (bus.awvalid, bus.bvalid)]
    bench.cover("back_to_back_reads", (asked == 5) & reads)
    bench.cover("kernel_starts", dut.start)
    return bench


def control() -> Bench:
    """Starts and completions are neither lost nor invented; what is read and the interrupt follow from them."""
    dut = KernelControl(UPDATE)
    bench = Bench(dut)
    for name in ("write", "write_offset", "write_data", "read", "read_offset", "done"):
        port = getattr(dut, name)
        bench.m.d.comb += port.eq(bench.free(port.shape(), name))
    asked, again, running, finished, ready = (
        Signal(name=name) for name in ("asked", "again", "ran", "finished", "took")
    )
    enabled, mask, status = Signal(), Signal(2), Signal(2)  # of the interrupt
    to_control = dut.write & (dut.write_offset == UPDATE["control"].offset)
    with bench.m.If(to_control):
        bench.m.d.sync += again.eq(dut.write_data[7])
    with bench.m.If(dut.write & (dut.write_offset == UPDATE["interrupt_enable"].offset)):
        bench.m.d.sync += enabled.eq(dut.write_data[0])
    with bench.m.If(dut.write & (dut.write_offset == UPDATE["interrupt_mask"].offset)):
        bench.m.d.sync += mask.eq(dut.write_data)
    toggled = Mux(dut.write & (dut.write_offset == UPDATE["interrupt_status"].offset), dut.write_data[:2], 0)
    polled = dut.read & (dut.read_offset == UPDATE["control"].offset)
    acknowledged = polled | (to_control & dut.write_data[4])
    bench.m.d.sync += [
        asked.eq(Mux(dut.done, again, asked | (to_control & dut.write_data[0]))),
        running.eq(~dut.done & (running | dut.start)),
        finished.eq(dut.done | (finished & ~acknowledged)),
        ready.eq(dut.done | (ready & ~polled)),
        status.eq(Mux(dut.done, status | mask, status ^ toggled)),
    ]

    bench.prove("starts_when_asked_and_free", dut.start == (asked & ~running & (~finished | again)))
    word = Cat(asked, finished, ~asked & ~running, ready, Const(0, 3), again)
    expected = Array([word, enabled, mask, status])[dut.read_offset[2:]]
    bench.prove("words_read_right", (dut.read_offset[:2] != 0) | (dut.read_data == expected))
    bench.prove("interrupt_while_enabled", dut.interrupt == (enabled & status.any()))
    bench.cover("second_run", dut.start & bench.past(acknowledged, "was_acknowledged"))
    return bench
