"""The attend kernel's page requests as those of the NAND controller, and its headers back again.

    PageRequest ─┬─────────────────► page_request(TAG) ─► NandController ─► page_header(TAG) ─► PageHeader
                 └─► page sizes ────────────┘
                        ▲ ContextRecord

Contract: one item out for one in, in order, with the page size of the request's context; PAGE requests ask for whole
pages, whose size is the largest. A context's record is written before the first request that needs it.

Timing: no latency (combinational, valid and ready); back-pressure: yes.
"""

from amaranth import Cat, Module, Mux, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.gateware.attention.engine.interfaces import (
    CONTEXT_BITS,
    ContextRecord,
    PageHeader,
    PageRequest,
    RequestKind,
)
from nearflash.gateware.nand.interfaces import page_header, page_request

__all__ = ["TAG", "NandRequests", "connect_operation_reads"]

TAG = data.StructLayout({name: field.shape for name, field in data.Layout.cast(PageHeader) if name != "codewords"})
"""What comes back with a page: its PageHeader without the codewords, which the controller knows."""
_PAGE_LOG2_MAX = 5


class NandRequests(wiring.Component):
    """Looks up page sizes by context.

    Members
    -------
    i_context : In, broadcast: valid, and record of ContextRecord.
    i : In stream of PageRequest, those with `memory` clear. o : Out stream of page_request(TAG), to the controller.
    i_header : In stream of page_header(TAG), from it. o_header : Out stream of PageHeader.
    """

    i_context: In(data.StructLayout({"valid": 1, "record": ContextRecord}))
    i: In(stream.Signature(PageRequest))
    o: Out(stream.Signature(page_request(TAG)))
    i_header: In(stream.Signature(page_header(TAG)))
    o_header: Out(stream.Signature(PageHeader))

    def elaborate(self, platform: object) -> Module:
        """The sizes of all contexts' pages; then field by field."""
        m = Module()
        m.submodules.page_sizes = sizes = Memory(shape=3, depth=1 << CONTEXT_BITS, init=[])
        write, size = sizes.write_port(), sizes.read_port(domain="comb")
        m.d.comb += [
            write.addr.eq(self.i_context.record.context),
            write.data.eq(_log2(self.i_context.record.page_codewords)),
            # Written with the context's broadcast, long before a request of it.
            write.en.eq(self.i_context.valid),
        ]

        request, o = self.i.payload, self.o.payload
        m.d.comb += [
            size.addr.eq(request.context),
            o.codewords.eq(request.codewords),
            # A page operation belongs to no context.
            o.page_log2.eq(Mux(request.kind == RequestKind.PAGE, _PAGE_LOG2_MAX, size.data)),
            Cat(o.row, o.lun).eq(request.address[:40]),
            *(o.tag[name].eq(request[name]) for name, _ in TAG),
            self.o.valid.eq(self.i.valid),
            self.i.ready.eq(self.o.ready),
        ]

        header, o_header = self.i_header.payload, self.o_header.payload
        m.d.comb += [
            o_header.codewords.eq(header.codewords),
            *(o_header[name].eq(header.tag[name]) for name, _ in TAG),
            self.o_header.valid.eq(self.i_header.valid),
            self.i_header.ready.eq(self.o_header.ready),
        ]
        return m


def connect_operation_reads(m: Module, source: stream.Interface, sink: stream.Interface) -> None:
    """Page operations' requests (a stream of OperationRead) as a stream of RoutedRequest, of kind PAGE: `index` is the
    operation's number, `page` its codewords."""
    read, routed = source.payload, sink.payload
    m.d.comb += [
        routed.channel.eq(read.channel),
        routed.request.kind.eq(RequestKind.PAGE),
        routed.request.index.eq(read.number),
        routed.request.page.eq(read.count),
        routed.request.codewords.eq(read.codewords),
        routed.request.address.eq(Cat(read.row, read.lun)),
        sink.valid.eq(source.valid),
        source.ready.eq(sink.ready),
    ]


def _log2(one_hot: Value) -> Value:
    return Cat(Cat(bit for at, bit in enumerate(one_hot) if at >> place & 1).any() for place in range(3))
