"""A component of streams as its mutants are observed: what means nothing is zero."""

from collections.abc import Callable
from typing import Any

from amaranth.hdl import Module, Mux, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In

__all__ = ["ObservedStreams", "gate"]


class ObservedStreams(wiring.Component):
    """`inner`, a component whose outputs are all streams, as the submodule `inner`; payloads without an item are zero.

    views: by output, what of a payload means something, as wide as the payload.
    """

    def __init__(self, inner: Any, **views: Callable[[Any], Any]) -> None:
        self._inner, self._views = inner, views
        super().__init__(inner.signature)

    def elaborate(self, platform: Any) -> Module:
        """Build it with the gates."""
        m = Module()
        m.submodules.inner = inner = self._inner
        for name, member in self.signature.members.items():
            if member.is_port:
                m.d.comb += getattr(inner, name).eq(getattr(self, name))
            elif member.flow == In:
                wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
            else:
                gate(m, getattr(inner, name), getattr(self, name), self._views.get(name))
        return m


def gate(m: Module, source: Any, sink: Any, view: Callable[[Any], Any] | None = None) -> None:
    """Connect two streams; the payload of `sink` is `view` of that of `source`, and zero where there is no item."""
    payload = view(source.payload) if view else source.payload
    m.d.comb += [
        sink.valid.eq(source.valid),
        source.ready.eq(sink.ready),
        sink.payload.eq(Mux(source.valid, Value.cast(payload), 0)),
    ]
