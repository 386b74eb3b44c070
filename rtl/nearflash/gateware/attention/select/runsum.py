"""RunSum: rows of a run and the run's maximum to entries.

mass = (sum over the valid tokens of (significand · 2^4 >> (M - floor(x)))) >> ceil(log2 e), M the floor of the entry's
largest logit, e the tokens that the entry can hold; in token selection each of the four tokens is an entry.

Timing: latency LATENCY cycles from a run's last row to its entries; one row a cycle, free-running.
Numerics: exact shifts toward zero; equals nearflash.model.attention.select.entries.
"""

from amaranth import C, Cat, Module, Mux, Signal, signed
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.fixed_point import MASS_BITS, MASS_GUARD_BITS, MAX_LOGIT_BITS
from nearflash.gateware.attention.select.entry import ENTRY, FRACTION_BITS
from nearflash.gateware.attention.select.helpers import strobe
from nearflash.gateware.attention.select.keystore import LANES
from nearflash.gateware.fp.pipeline import delay, output, register, shift_right, wire

__all__ = ["RUN_ROW", "RunSum"]

_RUN_TOKENS_LOG2 = 6
_SIGNIFICAND_BITS = 12
_DISTANCE_BITS = 4

#: Four tokens of a run; `last` ends it.
RUN_ROW = data.StructLayout(
    {
        "x": data.ArrayLayout(signed(MAX_LOGIT_BITS), LANES),
        "significand": data.ArrayLayout(_SIGNIFICAND_BITS, LANES),
        "valid": LANES,
        "last": 1,
    }
)


class RunSum(wiring.Component):
    """Sums of up to 16 rows.

    Members
    -------
    i : In, RUN_ROW. valid : In, `i` is a row.
    x_max : In, the run's largest logit; page : In, the run is one entry, of the lane `lane` (else each row is four);
    size_log2 : In: constant over the run.
    entries, mask : Out, LATENCY cycles after the run's last row.
    """

    #: Cycles from `i` to `entries`.
    LATENCY = 6

    i: In(RUN_ROW)
    valid: In(1)
    x_max: In(signed(MAX_LOGIT_BITS))
    page: In(1)
    lane: In(2)
    size_log2: In(3)
    entries: Out(data.ArrayLayout(ENTRY, LANES))
    mask: Out(LANES)

    def elaborate(self, platform: object) -> Module:
        """Shift, add up the row, add up the rows, shift."""
        m = Module()
        masses = []
        for lane in range(LANES):
            # Cycle 0: distance to the maximum. Cycle 1: shift.
            below = (self.x_max >> FRACTION_BITS) - (self.i.x[lane] >> FRACTION_BITS)
            below = wire(m, Mux(self.page, below.as_unsigned(), 0))
            distance = register(m, below[:_DISTANCE_BITS])
            none = register(m, below[_DISTANCE_BITS:].any() | ~self.i.valid[lane])
            shifted, _ = shift_right(m, Cat(C(0, MASS_GUARD_BITS), register(m, self.i.significand[lane])), distance)
            masses.append(register(m, Mux(none, 0, shifted)))
        # Cycles 2, 3: row. Cycle 4: rows; `first` is set where no run is open.
        pairs = [register(m, masses[0] + masses[1]), register(m, masses[2] + masses[3])]
        row = register(m, pairs[0] + pairs[1])
        first, total = Signal(init=1), Signal(MASS_BITS + _RUN_TOKENS_LOG2)
        valid, last = strobe(m, self.valid, 4)[-1], delay(m, self.i.last, 4)
        with m.If(valid):
            m.d.sync += [first.eq(last), total.eq(Mux(first, 0, total) + row)]
        # Cycle 5: scale; a lane's own mass has waited since cycle 2.
        page = delay(m, self.page, 5)
        scaled = wire(m, (total >> delay(m, self.size_log2, 5))[:MASS_BITS])
        page_x, page_lane = delay(m, self.x_max, 5), Cat(delay(m, self.lane, 5) == lane for lane in range(LANES))
        entries, mask = output(m, self.entries), output(m, self.mask)
        m.d.sync += mask.eq(Mux(page, page_lane, delay(m, self.i.valid, 5)))
        for lane, entry in enumerate(entries):
            own_x, own_mass = delay(m, self.i.x[lane], 5), delay(m, masses[lane], 3)
            m.d.sync += [entry.x_max.eq(Mux(page, page_x, own_x)), entry.mass.eq(Mux(page, scaled, own_mass))]
        return m
