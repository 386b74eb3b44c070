"""A component with broadcasts for the stream harnesses: broadcasts become streams, and streams wait for one another.

A broadcast is an input struct of `valid` and one other field, without back-pressure.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from amaranth import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In

__all__ = ["Ordered"]


class Ordered(wiring.Component):
    """`component` with the same streams; each of its broadcasts is a stream of the field beside `valid`.

    `after` names streams that move nothing until others have moved a number of items, which is an input of its own:
    with {"i_page": ["i_context"]} and `i_page_after_i_context` held at 4, the pages wait until four contexts are
    written. Other ports are left out.
    """

    def __init__(self, component: Any, after: Mapping[str, Sequence[str]]) -> None:
        self._component, self._after = component, after
        members = component.signature.members
        self._fields = {
            name: next(field for field, _ in member.shape if field != "valid")
            for name, member in members.items()
            if member.is_port and member.flow == wiring.In and name.startswith("i_")
        }
        self._streams = [name for name, member in members.items() if member.is_signature]
        super().__init__(
            {
                **{name: members[name] for name in self._streams},
                **{
                    name: In(stream.Signature(members[name].shape[field].shape)) for name, field in self._fields.items()
                },
                **{f"{name}_after_{other}": In(32) for name, others in after.items() for other in others},
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Count what moves; join each stream's valid and ready while what it waits for has come."""
        m = Module()
        m.submodules.component = inner = self._component
        moved = {name: Signal(32, name=f"{name}_moved") for name in (*self._streams, *self._fields)}
        for name, count in moved.items():
            outer, port, free = getattr(self, name), getattr(inner, name), Signal(name=f"{name}_free")
            waits = [moved[other] < getattr(self, f"{name}_after_{other}") for other in self._after.get(name, ())]
            m.d.comb += free.eq(~Cat(waits).any())
            with m.If(outer.valid & outer.ready):
                m.d.sync += count.eq(count + 1)
            if name in self._fields:
                m.d.comb += [port[self._fields[name]].eq(outer.payload), port.valid.eq(outer.valid & free)]
                m.d.comb += outer.ready.eq(free)
            else:
                source, sink = (outer, port) if name.startswith("i") else (port, outer)
                m.d.comb += [
                    sink.payload.eq(source.payload),
                    sink.valid.eq(source.valid & free),
                    source.ready.eq(sink.ready & free),
                ]
        return m
