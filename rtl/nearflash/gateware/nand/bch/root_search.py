"""Root search of the BCH code: the bits that an error locator names, by Chien's search, eight bits a cycle.

    register k:  L[k] · alpha^(-8·k·s)        s = 0, 1, … : bits 8s … 8s + 7 from the codeword's end
    lane b:      sum over k of register k · alpha^(-k·b), zero: bit 8s + b from the end is wrong

The search goes from the end (the pad) to the front and stops when all errors are found. Positions go on a stack, so
that they leave in ascending order once it is known that there are as many as the locator says.

Contract: for each codeword 17 coefficients in; out its error positions in ascending order, or one item that says
uncorrectable. Reset drops the codeword inside.

Timing: 17 cycles to take the locator, then 4 and one for each eight bits from the codeword's end to its first wrong bit
(at most 552), more where several of the eight are wrong, then one for each error; back-pressure: yes.
"""

from amaranth import Cat, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.attention.codeword import BCH_BITS, BCH_ERRORS, RAW_BYTES
from nearflash.gateware.coding import linear
from nearflash.gateware.fp.pipeline import wire
from nearflash.gateware.nand.bch.field import power, scaling
from nearflash.gateware.nand.bch.key_equation import Coefficient
from nearflash.gateware.nand.codeword import ErrorPosition

__all__ = ["RootSearch"]

_LANES = 8
_PAD_GROUPS = 2


class RootSearch(wiring.Component):
    """Finds the bits that a locator names.

    Members
    -------
    i : In stream of Coefficient, 17 a codeword.
    o : Out stream of ErrorPosition.
    """

    i: In(stream.Signature(Coefficient))
    o: Out(stream.Signature(ErrorPosition))

    def elaborate(self, platform: object) -> Module:
        """Registers, then the lanes' values, then which of them are zero: three groups of eight bits are under way."""
        m = Module()
        shifts, moves = Signal(), Signal()
        registers = [Signal(BCH_BITS, name=f"r{k}", reset_less=True) for k in range(BCH_ERRORS + 1)]
        sources = [*registers[1:], self.i.payload.value]
        with m.If(shifts):
            m.d.sync += [here.eq(above) for here, above in zip(registers, sources, strict=True)]
        with m.Elif(moves):
            for k, here in enumerate(registers):
                m.d.sync += here.eq(linear.apply(m, scaling(-_LANES * k), here, BCH_BITS))

        columns = [
            sum(power(row - k * b) << BCH_BITS * b for b in range(_LANES))
            for k in range(BCH_ERRORS + 1) for row in range(BCH_BITS)
        ]  # fmt: skip
        values, zeros = Signal(BCH_BITS * _LANES, reset_less=True), Signal(_LANES, reset_less=True)
        with m.If(moves):
            m.d.sync += values.eq(linear.apply(m, columns, Cat(registers), len(values), group=1))
        is_zero = Cat(~values.word_select(b, BCH_BITS).any() for b in range(_LANES))
        self._control(m, shifts, moves, zeros, is_zero)
        return m

    def _control(self, m: Module, shifts: Signal, moves: Signal, zeros: Signal, is_zero: Signal) -> None:
        """Loads, searches, and gives the positions, or gives up."""
        m.submodules.stack = stack = Memory(shape=len(self.o.payload.position), depth=BCH_ERRORS, init=[])
        push, pop = stack.write_port(), stack.read_port(domain="comb")
        loaded, errors, found = Signal(range(BCH_ERRORS + 1)), Signal(5), Signal(range(BCH_ERRORS + 1))
        group = Signal(range(RAW_BYTES + 2))  # of `zeros`: its byte in the codeword; two more while the first come
        lowest = wire(m, Cat(zeros[b] & ~zeros[:b].any() for b in range(_LANES)))
        rest = wire(m, zeros & ~lowest)
        lane = Cat(Cat(lowest[b] for b in range(_LANES) if b >> bit & 1).any() for bit in range(3))
        in_code = group < RAW_BYTES - _PAD_GROUPS
        m.d.comb += [
            push.addr.eq(found),
            push.data.eq(Cat(~lane, group)),
            pop.addr.eq(found - 1),
            self.o.payload.position.eq(pop.data),
        ]
        with m.FSM():
            with m.State("LOAD"):
                m.d.comb += [self.i.ready.eq(1), shifts.eq(self.i.valid)]
                m.d.sync += [errors.eq(self.i.payload.errors), found.eq(0), group.eq(RAW_BYTES + 1)]
                with m.If(self.i.valid):
                    m.d.sync += loaded.eq(loaded + 1)
                    with m.If(loaded == BCH_ERRORS):
                        m.d.sync += loaded.eq(0)
                        m.next = "SEARCH"
            with m.State("SEARCH"):
                # Several zeros in a group leave one by one: the search stands still meanwhile.
                m.d.comb += [moves.eq(~rest.any()), push.en.eq(zeros.any() & in_code)]
                with m.If(moves):
                    m.d.sync += [zeros.eq(is_zero), group.eq(group - 1)]
                with m.Else():
                    m.d.sync += zeros.eq(rest)
                with m.If(push.en):
                    m.d.sync += found.eq(found + 1)
                # As many roots as the polynomial has degrees; with fewer in the codeword it was no correctable error.
                with m.If(found == errors):
                    m.next = "GIVE"
                with m.Elif((errors > BCH_ERRORS) | group.all()):  # below zero
                    m.next = "GIVE-UP"
            with m.State("GIVE"):
                m.d.comb += [self.o.payload.last.eq(found == 1), self.o.valid.eq(1)]
                with m.If(self.o.ready):
                    # A stack: positions leave in ascending order, the reverse of the search.
                    m.d.sync += found.eq(found - 1)
                    with m.If(found == 1):
                        m.next = "LOAD"
            with m.State("GIVE-UP"):
                m.d.comb += [self.o.payload.last.eq(1), self.o.payload.uncorrectable.eq(1), self.o.valid.eq(1)]
                with m.If(self.o.ready):
                    m.next = "LOAD"
