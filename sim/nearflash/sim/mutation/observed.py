"""A component of streams as its mutants are observed: payloads without an item are zero."""

from typing import Any

from amaranth.hdl import Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In

__all__ = ["ObservedStreams", "gate"]


class ObservedStreams(wiring.Component):
    """`inner`, a component whose ports are all streams; it is the submodule `inner`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        super().__init__(inner.signature)

    def elaborate(self, platform: Any) -> Module:
        """Build it with the gates."""
        m = Module()
        m.submodules.inner = inner = self._inner
        for name, member in self.signature.members.items():
            if member.flow == In:
                wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
            else:
                gate(m, getattr(inner, name), getattr(self, name))
        return m


def gate(m: Module, source: Any, sink: Any, known: Any = True) -> None:
    """Connect two streams; the payload of `sink` is zero where there is no item, or it is not `known`."""
    payload = Value.cast(source.payload)
    m.d.comb += [
        sink.valid.eq(source.valid),
        source.ready.eq(sink.ready),
        sink.payload.eq(Mux(source.valid & known, payload, 0)),
    ]
