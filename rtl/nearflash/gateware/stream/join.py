"""Stream join: one item of each input becomes one struct.

Contract: item n of `o` holds item n of every input. All inputs are taken in the same cycle. There is no state.

Timing: latency 0 cycles (combinational); one item a cycle; back-pressure: yes. An input's ready depends on the valid of
the other inputs, so a producer must not wait for ready before it raises valid (the rule of `amaranth.lib.stream`).
"""

from collections.abc import Mapping

from amaranth import Cat, Module
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

__all__ = ["Join"]


class Join(wiring.Component):
    """Join named streams into one stream of a struct with the same names.

    Parameters
    ----------
    shapes : name of each input -> its payload shape; at least one.

    Members
    -------
    i : an In stream for each name (`i.<name>`).
    o : Out stream of `data.StructLayout(shapes)`.

    Raises
    ------
    ValueError : `shapes` is empty.
    """

    #: Cycles from the last input to `o`.
    LATENCY = 0

    def __init__(self, shapes: Mapping[str, ShapeLike]) -> None:
        if not shapes:
            raise ValueError(f"shapes must name at least one input, not {shapes!r}")
        self.names = tuple(shapes)
        inputs = wiring.Signature({name: Out(stream.Signature(shape)) for name, shape in shapes.items()})
        super().__init__({"i": In(inputs), "o": Out(stream.Signature(data.StructLayout(dict(shapes))))})

    def elaborate(self, platform: object) -> Module:
        """Valid is the AND of all; each input is taken when the struct is."""
        m = Module()
        inputs = [getattr(self.i, name) for name in self.names]
        m.d.comb += self.o.valid.eq(Cat(i.valid for i in inputs).all())
        for name, i in zip(self.names, inputs, strict=True):
            m.d.comb += [self.o.payload[name].eq(i.payload), i.ready.eq(self.o.valid & self.o.ready)]
        return m
