"""State encoder: groups of fp32 values of m or v to groups of stored elements, and of mx8 the scales beside them.

    i ─► BlockScale ─┬─ lanes of ElementEncoder in a CreditPipeline ─► o
          Dither ────┘└─ of a block's last group: its scale ─► queue ─► o_scale

Contract: a group out for each group in, in order, its strobes and `last` with it. The elements stand side by side in
the lowest bits. In format mx8 (only there) there is a scale for each block: written where the block's last group is, in
all of its lanes; `last` with the command's last one. A command comes before its groups and after those of the one
before; `form` must stay as it is while anything is inside.

Timing: latency of a group LATENCY cycles; in format mx8 from a block's last group to its first one, as many more as
BlockScale takes for that; the first group not before its dither (Dither.LATENCY); one group a cycle; back-pressure:
yes.
Numerics: those of ElementEncoder.
"""

from amaranth import Cat, Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.optimizers.state import DITHER_BITS, StateFormat
from nearflash.gateware.stream.credit import CreditPipeline
from nearflash.gateware.stream.datapath import Datapath, Timed
from nearflash.gateware.stream.queue import StreamQueue
from nearflash.gateware.update.block_scale import SCALE_BITS, BlockScale, state_group
from nearflash.gateware.update.dither import Dither, DitherCommand
from nearflash.gateware.update.element_encoder import ElementEncoder
from nearflash.gateware.update.state_form import FORM_BITS, per_format

__all__ = ["StateEncoder", "scale_group"]


def scale_group() -> data.StructLayout:
    """A scale byte, whether it is to be written, and whether it is the command's last one."""
    return data.StructLayout({"data": SCALE_BITS, "strb": 1, "last": 1})


class StateEncoder(wiring.Component):
    """Encodes one array.

    Parameters
    ----------
    lanes : parameters of a group, a power of two up to 8.
    role : the array, "m" or "v".

    Members
    -------
    form : In, StateFormat.code.
    i_command : In stream of DitherCommand, always ready.
    i : In stream of `state_group`.
    o : Out stream of `state_group`. o_scale : Out stream of `scale_group`.
    """

    def __init__(self, lanes: int, role: str) -> None:
        self.lanes, self._role = lanes, role
        operand = data.StructLayout({"group": state_group(lanes), "scale": SCALE_BITS,
                                     "dither": data.ArrayLayout(DITHER_BITS, lanes)})  # fmt: skip
        self._credit = CreditPipeline(ElementEncoder.LATENCY, operand, state_group(lanes))
        #: Cycles from a group to its stored elements where there are no blocks.
        self.LATENCY = BlockScale.LATENCY_ALONE + self._credit.LATENCY
        super().__init__(
            {
                "form": In(FORM_BITS),
                "i_command": In(stream.Signature(DitherCommand)),
                "i": In(stream.Signature(state_group(lanes))),
                "o": Out(stream.Signature(state_group(lanes))),
                "o_scale": Out(stream.Signature(scale_group())),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """A group goes on when its dither is there and, at the end of a block, room for the scale."""
        m = Module()
        m.submodules.credit = credit = self._credit
        m.submodules.blocks = blocks = BlockScale(self.lanes, self._role)
        m.submodules.dither = dither = Dither(self.lanes, self._role)
        m.submodules.scales = scales = StreamQueue(scale_group(), 2)
        wiring.connect(m, wiring.flipped(self.i_command), dither.i_command)
        wiring.connect(m, wiring.flipped(self.i), blocks.i)
        wiring.connect(m, credit.o, wiring.flipped(self.o))
        wiring.connect(m, scales.o, wiring.flipped(self.o_scale))
        mx8 = self.form == StateFormat.MX8.code
        block, group = blocks.o.payload, blocks.o.payload.group
        dithered = dither.o.valid | (self.form == StateFormat.FP32.code)
        # Room for the scale is asked before the group goes: group and scale leave in one cycle or not at all.
        scaled = scales.i.ready | ~block.end | ~mx8
        m.d.comb += [
            blocks.blocks.eq(mx8),
            credit.i.payload.group.eq(group),
            credit.i.payload.scale.eq(block.scale),
            credit.i.payload.dither.eq(dither.o.payload),
            credit.i.valid.eq(blocks.o.valid & dithered & scaled),
            blocks.o.ready.eq(credit.i.ready & dithered & scaled),
            dither.o.ready.eq(credit.i.ready & blocks.o.valid & scaled),
            scales.i.payload.data.eq(block.scale),
            # Blocks are whole or discarded: a scale is written exactly where its last group is.
            scales.i.payload.strb.eq(group.strb.all()),
            scales.i.payload.last.eq(group.last),
            scales.i.valid.eq(credit.i.ready & blocks.o.valid & dithered & block.end & mx8),
        ]
        self._encode(m)
        return m

    def _encode(self, m: Module) -> None:
        """Lanes, and strobes and `last` beside them."""
        credit, path = self._credit, Datapath(m)
        elements = []
        for index in range(self.lanes):
            m.submodules[f"lane_{index}"] = lane = ElementEncoder(self._role)
            elements.append(lane.o)
            m.d.comb += [
                lane.form.eq(self.form),
                lane.i.eq(credit.core_i.group.data.word_select(index, FP32.bits)),
                lane.scale.eq(credit.core_i.scale),
                lane.dither.eq(credit.core_i.dither[index]),
            ]
        side_by_side = [Cat(element[: 8 * form.element_bytes] for element in elements) for form in StateFormat]
        result = credit.core_o
        m.d.comb += result.data.eq(per_format(self.form, *side_by_side))
        for name in ("strb", "last"):
            m.d.comb += result[name].eq(path.delay(Timed(credit.core_i.group[name], 0), credit.core_latency))
