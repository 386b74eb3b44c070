"""Page operations of a batch before a memory and channels made of Python: order, completions, faults."""

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from amaranth.sim import Simulator

from nearflash.abi.attention.codeword import PageKind, PageTag
from nearflash.abi.attention.page_operation import OperationCompletion, OperationKind, PageFault, PageOperation
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.bus.axi import AxiResponse
from nearflash.gateware.nand.pages.mover import PageMover
from nearflash.model.nand.codeword import raw_codewords

CONFIG = CONFIGS["attend-tiny"]
RECORDS, COMPLETIONS, PAGES, BAD = 0x1000, 0x2000, 0x4000, 0x40000
OWNER = PageTag(0x01020304, 7, 9)
ERASE = PageOperation(OperationKind.ERASE, 0, 1, 0x100, 4096)
PROGRAM = PageOperation(OperationKind.PROGRAM, 1, 2, 0x123456, 4096, PAGES, OWNER, 5, PageKind.INDEX)
READ = replace(PROGRAM, kind=OperationKind.READ, address=PAGES + 0x2000)


class Channel:
    """Takes operations, `luns` of them at work at a time, and answers."""

    def __init__(self, bad_units):
        self.waiting, self.working, self.results = deque(), {}, deque()
        self.wanted = self.moving = None
        self.sealed, self.program, self.bad_units, self.log = deque(), [], bad_units, []

    def step(self, rng):
        """What goes on inside between two cycles."""
        for lun, (left, item) in list(self.working.items()):
            self.working[lun] = (left - 1, item)
            if not left:
                del self.working[lun]
                self.results.append(item)
        if not self.waiting or self.wanted or self.moving:
            return
        item = self.waiting[0]
        if item["lun"] in self.working:
            return
        if item.get("read") or not (item["erase"] or item.get("moved")):
            self.wanted = item
            return
        self.waiting.popleft()
        self.log.append((item["number"], item["lun"]))
        result = {name: item[name] for name in ("erase", "lun", "number")}
        self.working[item["lun"]] = (rng.randrange(20, 400), result | {"failed": item["lun"] in self.bad_units})


class Bench:
    """The mover, a memory with errors from BAD on, and its channels."""

    def __init__(self, operations, pages=(), *, stored=(), bad_units=(), percent=60, places=3, bad_record=None):
        self.rng, self.percent, self.places = random.Random(1), percent, places
        self.stored, self.bad_record = stored, bad_record
        self.memory = bytearray(BAD)
        packed = b"".join(one.pack() for one in operations)
        self.memory[RECORDS : RECORDS + len(packed)] = packed
        for address, page in pages:
            self.memory[address : address + page.size] = page.tobytes()
        self.count, self.ended, self.lost = len(operations), 0, 0
        self.channels = [Channel(bad_units) for _ in range(CONFIG.channels)]
        self.reads, self.writes, self.beats, self.answers = deque(), deque(), deque(), deque()

    def run(self, completions=COMPLETIONS, limit_cycles=30_000):
        """Completions of all operations."""
        self.dut, self.completions, self.limit_cycles = PageMover(CONFIG), completions, limit_cycles
        simulator = Simulator(self.dut)
        simulator.add_clock(1e-6)
        simulator.add_testbench(self._bench)
        simulator.run()
        records = bytes(self.memory[completions : completions + 8 * self.count])
        return [OperationCompletion.unpack(records[at : at + 8]) for at in range(0, len(records), 8)]

    def _chance(self):
        return self.rng.randrange(100) < self.percent

    async def _bench(self, ctx):
        dut, numbers = self.dut, 0
        ctx.set(dut.operations_address, RECORDS)
        ctx.set(dut.completions_address, self.completions)
        ctx.set(dut.begin, 1)
        await ctx.tick()
        ctx.set(dut.begin, 0)
        ctx.set(dut.active, 1)
        for _ in range(self.limit_cycles):
            ctx.set(dut.i.valid, numbers < self.count)
            ctx.set(dut.i.payload, numbers)
            ctx.set(dut.o_request.ready, self._chance())
            self._offer_memory(ctx)
            for port, channel in zip(dut.channel, self.channels, strict=True):
                self._offer_channel(ctx, port, channel)
            numbers += ctx.get(dut.i.valid) & ctx.get(dut.i.ready)
            self.ended += ctx.get(dut.ended)
            self._take_memory(ctx)
            for port, channel in zip(dut.channel, self.channels, strict=True):
                self._take_channel(ctx, port, channel)
            self._take_request(ctx)
            await ctx.tick()
            for channel in self.channels:
                channel.step(self.rng)
            if self.ended == self.count:
                self.lost = ctx.get(dut.lost)
                return
        raise TimeoutError(f"{self.ended} of {self.count} operations ended")

    def _offer_channel(self, ctx, port, channel):
        ctx.set(port.operation.ready, len(channel.waiting) < self.places)
        ctx.set(port.result.valid, bool(channel.results))
        if channel.results:
            ctx.set(port.result.payload, channel.results[0])
        ctx.set(port.wanted.valid, channel.wanted is not None)
        if item := channel.wanted:
            names = ("number", "codewords", "lun")
            ctx.set(port.wanted.payload, {name: item[name] for name in names} | {"read": item.get("read", 0)})
        ctx.set(port.program.ready, channel.moving is not None and self._chance())
        ctx.set(port.sealed.valid, bool(channel.sealed) and self._chance())
        if channel.sealed:
            ctx.set(port.sealed.payload, channel.sealed[0])

    def _take_channel(self, ctx, port, channel):
        if ctx.get(port.operation.valid) and ctx.get(port.operation.ready):
            names = ("erase", "lun", "row", "codewords", "number")
            channel.waiting.append({name: ctx.get(getattr(port.operation.payload, name)) for name in names})
        if ctx.get(port.result.valid) and ctx.get(port.result.ready):
            channel.results.popleft()
        if ctx.get(port.program.valid) and ctx.get(port.program.ready):
            channel.program.append(ctx.get(port.program.payload))
            if len(channel.program) % (69 * channel.moving["codewords"]) == 0:
                channel.moving["moved"], channel.moving = True, None
        if ctx.get(port.sealed.valid) and ctx.get(port.sealed.ready):
            channel.sealed.popleft()
        if channel.wanted and ctx.get(port.wanted.ready):
            item, channel.wanted = channel.wanted, None
            if item.get("read"):
                channel.waiting.popleft()
                for codeword in self.stored[item["number"]]:
                    beats = [1, 2, *(int(word) for word in codeword.view("<u8"))]
                    channel.sealed += [{"data": beat, "corrected": 0, "uncorrectable": 0} for beat in beats]
            else:
                channel.moving = item

    def _take_request(self, ctx):
        o = self.dut.o_request
        if ctx.get(o.valid) and ctx.get(o.ready):
            assert not any(c.waiting or c.working or c.results for c in self.channels if not c.sealed and not c.wanted)
            request = o.payload
            assert ctx.get(request.codewords) == (1 << ctx.get(request.count)) - 1
            item = {"read": 1, "number": ctx.get(request.number), "codewords": ctx.get(request.count)}
            self.channels[ctx.get(request.channel)].waiting.append(item | {"lun": ctx.get(request.lun)})

    def _offer_memory(self, ctx):
        read, write = self.dut.read_bus, self.dut.write_bus
        for ready in (read.arready, write.awready, write.wready):
            ctx.set(ready, self._chance())
        ctx.set(read.rvalid, bool(self.reads) and self._chance())
        if self.reads:
            address, last = self.reads[0]
            wrong = address >= BAD or address == self.bad_record
            ctx.set(read.rdata, 0 if wrong else int.from_bytes(self.memory[address : address + 8], "little"))
            ctx.set(read.rresp, AxiResponse.SLVERR if wrong else AxiResponse.OKAY)
            ctx.set(read.rlast, last)
        ctx.set(write.bvalid, bool(self.answers))
        if self.answers:
            ctx.set(write.bresp, AxiResponse.SLVERR if self.answers[0] >= BAD else AxiResponse.OKAY)

    def _take_memory(self, ctx):
        read, write = self.dut.read_bus, self.dut.write_bus
        if ctx.get(read.rvalid) and ctx.get(read.rready):
            self.reads.popleft()
        if ctx.get(read.arvalid) and ctx.get(read.arready):
            address, beats = ctx.get(read.araddr), ctx.get(read.arlen) + 1
            self.reads += [(address + 8 * beat, beat == beats - 1) for beat in range(beats)]
        if ctx.get(write.bvalid) and ctx.get(write.bready):
            self.answers.popleft()
        if ctx.get(write.awvalid) and ctx.get(write.awready):
            self.writes.append(ctx.get(write.awaddr))
        if ctx.get(write.wvalid) and ctx.get(write.wready):
            self.beats.append(ctx.get(write.wdata))
            if ctx.get(write.wlast):
                self.beats.append(None)
        while self.writes and None in self.beats:
            address = at = self.writes.popleft()
            while (beat := self.beats.popleft()) is not None:
                if at < BAD:
                    self.memory[at : at + 8] = beat.to_bytes(8, "little")
                at += 8
            self.answers.append(address)


def words(pages):
    return [int(word) for word in np.ascontiguousarray(pages).view("<u8").ravel()]


@pytest.mark.full
def test_programs_erases_and_reads(make_sealed):
    sealed = [make_sealed(OWNER, 5, PageKind.INDEX, 8, second, seed) for second, seed in ((False, 1), (True, 2))]
    second = replace(PROGRAM, row=0x123457, address=PAGES + 0x1080, second=True)
    reads = [READ, replace(READ, row=0x123457, address=PAGES + 0x3088, second=True)]
    operations = [ERASE, replace(ERASE, channel=1), PROGRAM, replace(ERASE, lun=3), second, *reads, ERASE]
    stored = {5: sealed[0], 6: sealed[1]}
    bench = Bench(operations, zip((PROGRAM.address, second.address), sealed, strict=True), stored=stored)
    assert bench.run() == [OperationCompletion(PageFault(0))] * 8
    assert [bench.channels[channel].log for channel in (0, 1)] == [[(0, 1), (3, 3), (7, 1)], [(1, 1), (2, 2), (4, 2)]]
    assert bench.channels[1].program == words(raw_codewords(np.stack(sealed), [PROGRAM.row, second.row], [2, 2]))
    for operation, page in zip(reads, sealed, strict=True):
        assert bytes(bench.memory[operation.address : operation.address + page.size]) == page.tobytes()


BAD_RECORDS = {
    "kind": replace(ERASE, kind=0), "channel": replace(ERASE, channel=2), "lun": replace(ERASE, lun=4),
    "row": replace(ERASE, row=1 << 24), "small page": replace(ERASE, page_bytes=2048),
    "large page": replace(ERASE, page_bytes=8192), "alignment": replace(PROGRAM, address=PAGES + 4),
    "address": replace(PROGRAM, address=1 << 48), "index": replace(PROGRAM, index=1 << 20),
    "page kind": replace(PROGRAM, page_kind=2), "second": replace(PROGRAM, second=2),
}  # fmt: skip


def test_bad_records_are_told_and_others_done():
    bench = Bench([ERASE, *BAD_RECORDS.values(), ERASE])
    faults = [one.faults for one in bench.run()]
    assert dict(zip(BAD_RECORDS, faults[1:-1], strict=True)) == dict.fromkeys(BAD_RECORDS, PageFault.DESCRIPTOR)
    assert faults[0] == faults[-1] == PageFault(0)
    assert [number for number, _ in bench.channels[0].log] == [0, len(BAD_RECORDS) + 1]


@pytest.mark.full
def test_faults_of_units_and_pages_stay_with_their_operations(make_sealed):
    good = make_sealed(OWNER, 5, PageKind.INDEX, 8, False, 1)
    misdirected = make_sealed(OWNER, 6, PageKind.INDEX, 8, False, 2)
    operations = [
        replace(PROGRAM, lun=3),  # fails
        replace(PROGRAM, address=PAGES + 0x1080),  # misdirected
        replace(PROGRAM, address=BAD),
        replace(ERASE, channel=1, lun=2),
        replace(READ, address=BAD),
        replace(READ, address=PAGES + 0x3000),  # misdirected
    ]
    pages = [(PROGRAM.address, good), (PAGES + 0x1080, misdirected)]
    bench = Bench(operations, pages, stored={4: good, 5: misdirected}, bad_units=(3,))
    faults = [one.faults for one in bench.run()]
    assert faults[:2] == [PageFault.FAILED, PageFault.MISDIRECTED] and faults[2] & PageFault.MEMORY
    assert faults[3:] == [PageFault(0), PageFault.MEMORY, PageFault.MISDIRECTED]


@pytest.mark.parametrize("record", [0, 1])
def test_a_record_that_cannot_be_read_does_nothing(record):
    bench = Bench([ERASE, replace(ERASE, lun=2)], bad_record=RECORDS + 32 * record + 16)
    assert [one.faults for one in bench.run()][record] == PageFault.MEMORY
    assert [number for number, _ in bench.channels[0].log] == [1 - record]


def test_completions_that_cannot_be_written_are_lost():
    bench = Bench([ERASE, ERASE])
    bench.run(completions=BAD)
    assert bench.lost


@pytest.mark.full
def test_a_full_channel_does_not_stop_what_it_needs_itself(make_sealed):
    """More programs than a channel's queue holds: the records behind wait, their pages do not."""
    page = make_sealed(OWNER, 5, PageKind.INDEX, 8, False, 1)
    operations = [PROGRAM, replace(PROGRAM, row=PROGRAM.row + 1), ERASE]
    bench = Bench(operations, [(PROGRAM.address, page)], percent=100, places=1)
    assert bench.run() == [OperationCompletion(PageFault(0))] * 3
    assert [number for number, _ in bench.channels[1].log] == [0, 1]


def test_port_message():
    with pytest.raises(ValueError, match="port_bits must be 64, not 128"):
        PageMover(replace(CONFIG, port_bits=128))
