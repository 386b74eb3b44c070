"""Page requests of the kernel as those of the controller: page sizes by context, headers unchanged."""

import random

import pytest
from amaranth import Module
from amaranth.hdl import Fragment
from amaranth.lib import data, stream
from amaranth.sim import Simulator

from nearflash.gateware.attention.control.nand_requests import TAG, NandRequests, connect_operation_reads
from nearflash.gateware.attention.engine.interfaces import PageHeader, PageRequest, RequestKind, RoutedRequest
from nearflash.gateware.nand.interfaces import OperationRead

PAGE_CODEWORDS = {0: 8, 1: 32, 5: 1, 63: 2}


def simulate(dut, drive):
    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(drive)
    simulator.run()


def test_page_sizes_come_from_the_context_and_headers_come_back():
    dut, rng = NandRequests(), random.Random(4)

    async def drive(ctx):
        for context, size in PAGE_CODEWORDS.items():
            ctx.set(dut.i_context.valid, 1)
            ctx.set(dut.i_context.record, {"context": context, "page_codewords": size})
            await ctx.tick()
        ctx.set(dut.i_context.valid, 0)
        for _ in range(200):
            request = {name: rng.getrandbits(field.width) for name, field in data.Layout.cast(PageRequest)}
            request["kind"] = rng.choice(list(RequestKind))
            request["context"] = rng.choice(list(PAGE_CODEWORDS))
            valid, ready = rng.getrandbits(1), rng.getrandbits(1)
            ctx.set(dut.i.payload, request)
            ctx.set(dut.i.valid, valid)
            ctx.set(dut.o.ready, ready)
            assert (ctx.get(dut.o.valid), ctx.get(dut.i.ready)) == (valid, ready)
            o = ctx.get(dut.o.payload)
            codewords = 32 if request["kind"] is RequestKind.PAGE else PAGE_CODEWORDS[request["context"]]
            assert (1 << o.page_log2, o.codewords) == (codewords, request["codewords"])
            assert (o.row, o.lun) == (request["address"] & 0xFFFFFFFF, request["address"] >> 32 & 0xFF)

            ctx.set(dut.i_header.payload, {"tag": o.tag, "codewords": o.codewords})
            ctx.set(dut.i_header.valid, valid)
            ctx.set(dut.o_header.ready, ready)
            assert (ctx.get(dut.o_header.valid), ctx.get(dut.i_header.ready)) == (valid, ready)
            header = ctx.get(dut.o_header.payload)
            for name, _ in data.Layout.cast(PageHeader):
                assert header[name] == request[name], name
            await ctx.tick()

    simulate(dut, drive)


def test_the_tag_and_the_codewords_are_the_header():
    assert TAG.size + 64 == data.Layout.cast(PageHeader).size


@pytest.mark.parametrize("count", [8, 16, 32])
def test_operation_reads_become_requests_of_kind_page(count):
    source, sink = stream.Signature(OperationRead).create(), stream.Signature(RoutedRequest).create()
    m = Module()
    connect_operation_reads(m, source, sink)
    read = {"channel": 9, "number": 0xBEEF, "count": count, "codewords": (1 << count) - 1, "row": 0x12345678, "lun": 77}

    async def drive(ctx):
        ctx.set(source.payload, read)
        ctx.set(source.valid, 1)
        ctx.set(sink.ready, 1)
        routed = ctx.get(sink.payload)
        assert routed.channel == 9 and routed.request.kind == RequestKind.PAGE and not routed.request.memory
        assert (routed.request.index, routed.request.page) == (0xBEEF, count)
        assert routed.request.codewords == read["codewords"] and routed.request.address == 77 << 32 | 0x12345678
        assert ctx.get(sink.valid) and ctx.get(source.ready)

    simulator = Simulator(Fragment.get(m, None))
    simulator.add_testbench(drive)
    simulator.run()
