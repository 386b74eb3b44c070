"""Block scale: groups of fp32 values, each with the scale byte of its block of 32, known when the block has ended.

    i ─┬─► LUT RAM queue of two blocks ─────────────────┬─► o
       └─► largest exponent of the block ─► small queue ┘

Contract: groups leave in order. Where `blocks`, 32 / lanes of them are a block, and each leaves with the block's scale
after its last one has come; `end` marks that one. Else they leave at once, and `scale` and `end` mean nothing. A
command has whole blocks; `blocks` must stay as it is while anything is inside.

Timing: LATENCY cycles from a block's last group to its first one on `o`, or LATENCY_ALONE of a group by itself; one
group a cycle; back-pressure: yes. i.ready and o.valid come from registers.
Numerics: fp32 -> the largest exponent field of the block's finite values, or the format's least scale where that is
more; equals the scales of nearflash.model.update.state.encode.
"""

from amaranth import Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.formats import FP32
from nearflash.abi.optimizers.state import BLOCK_PARAMS, MX8
from nearflash.gateware.stream.queue import StreamQueue

__all__ = ["SCALE_BITS", "BlockScale", "block_group", "state_group"]

SCALE_BITS = 8
_EXPONENT = slice(FP32.mantissa_bits, FP32.mantissa_bits + FP32.exponent_bits)
_BLOCKS = 2


def state_group(lanes: int) -> data.StructLayout:
    """fp32 values of `lanes` parameters, whether each is to be written, and whether the group is the last one."""
    return data.StructLayout({"data": FP32.bits * lanes, "strb": lanes, "last": 1})


def block_group(lanes: int) -> data.StructLayout:
    """A `state_group` in its block."""
    return data.StructLayout({"group": state_group(lanes), "scale": SCALE_BITS, "end": 1})


class BlockScale(wiring.Component):
    """Finds the scales of one array.

    Parameters
    ----------
    lanes : parameters of a group, a power of two up to 8.
    role : the array, "m" or "v".

    Members
    -------
    blocks : In.
    i : In stream of `state_group`.
    o : Out stream of struct {group: `state_group`, scale: 8, end: 1}.
    """

    #: Cycles of a group from `i` to `o` where there are no blocks.
    LATENCY_ALONE = StreamQueue.LATENCY["distributed"]

    def __init__(self, lanes: int, role: str) -> None:
        self.lanes, self._least = lanes, MX8[role].least_scale
        self._steps = max(1, lanes.bit_length() - 1)
        #: Cycles from a block's last group to its first one on `o`.
        self.LATENCY = self._steps + 2
        super().__init__(
            {
                "blocks": In(1),
                "i": In(stream.Signature(state_group(lanes))),
                "o": Out(stream.Signature(block_group(lanes))),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Two blocks have room, so at most two scales wait; a third may come in the cycle in which one leaves.

        The queue also has room for what comes until the first block can leave.
        """
        m = Module()
        groups = BLOCK_PARAMS // self.lanes
        room = max(_BLOCKS * groups, groups + self.LATENCY)
        m.submodules.groups = queue = StreamQueue(state_group(self.lanes), room)
        m.submodules.scales = scales = StreamQueue(SCALE_BITS, _BLOCKS + 1)
        place_in, place_out = Signal(range(groups)), Signal(range(groups))
        pushed, able = Signal(), Signal()
        wiring.connect(m, wiring.flipped(self.i), queue.i)
        m.d.comb += pushed.eq(self.i.valid & self.i.ready & self.blocks)

        # One comparison a cycle: pairs of lanes, pairs of those, … , the group's largest exponent; then the block's.
        exponents, there, ended = [self._exponent(lane) for lane in range(self.lanes)], pushed, Signal()
        m.d.comb += ended.eq(pushed & (place_in == groups - 1))
        with m.If(pushed):
            m.d.sync += place_in.eq(place_in + 1)
        for step in range(self._steps):
            exponents = _registers(m, f"largest_{step}", _larger_of_pairs(exponents))
            there, ended = _registers(m, f"group_{step}", [there, ended])
        (largest,) = exponents
        so_far, known = Signal(SCALE_BITS, init=self._least), Signal()
        m.d.sync += known.eq(ended)
        with m.If(there):
            m.d.sync += so_far.eq(_larger(largest, Mux(known, self._least, so_far)))
        with m.Elif(known):
            m.d.sync += so_far.eq(self._least)
        m.d.comb += [scales.i.valid.eq(known), scales.i.payload.eq(so_far)]

        last = place_out == groups - 1
        m.d.comb += [
            able.eq(scales.o.valid | ~self.blocks),
            self.o.valid.eq(queue.o.valid & able),
            self.o.payload.group.eq(queue.o.payload),
            self.o.payload.scale.eq(scales.o.payload),
            self.o.payload.end.eq(last),
            queue.o.ready.eq(self.o.ready & able),
            scales.o.ready.eq(self.o.ready & queue.o.valid & last & self.blocks),
        ]
        with m.If(self.o.valid & self.o.ready & self.blocks):
            m.d.sync += place_out.eq(place_out + 1)
        return m

    def _exponent(self, lane: int) -> Value:
        """Exponent field of a finite value, else 0."""
        field = self.i.payload.data.word_select(lane, FP32.bits)[_EXPONENT]
        return Mux(field.all(), 0, field)


def _larger(one: Value, other: Value) -> Value:
    return Mux(one > other, one, other)


def _larger_of_pairs(values: list[Value]) -> list[Value]:
    """Half as many values, or the only one."""
    return [_larger(*values[at : at + 2]) for at in range(0, len(values), 2)] if len(values) > 1 else values


def _registers(m: Module, name: str, values: list[Value]) -> list[Signal]:
    """Each value a cycle later."""
    later = [Signal(len(value), name=f"{name}_{at}") for at, value in enumerate(values)]
    m.d.sync += [register.eq(value) for register, value in zip(later, values, strict=True)]
    return later
