"""Proof of the pair merge, for groups of four."""

from typing import Any

from amaranth.hdl import Cat, Mux, Signal

from nearflash.abi.topk import TILE_BITS
from nearflash.gateware.gradients.pair_demux import Place
from nearflash.gateware.gradients.pairs import PairMerge
from nearflash.gateware.gradients.values import ROW_PAIRS
from nearflash.verify.proofs.harness import ProofHarness
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.properties import accept, check_source, moves, offer

__all__ = ["PROOF", "build_proof"]

_LANES = 4
_GROUP_BITS = TILE_BITS - 2
_GROUPS = 1 << _GROUP_BITS


class _Groups:
    """Groups of the command, and the tile that is being merged."""

    def __init__(self, harness: ProofHarness, dut: Any) -> None:
        m = harness.m
        self.begins = moves(dut.i_params)
        self.fresh = dut.o.valid & ~harness.past(dut.o.valid & ~dut.o.ready, "waited")  # made in the cycle before
        self.left, self.number = Signal(32), Signal(_GROUP_BITS)  # of the next fresh one in its tile
        self.tile, self.last = Signal(), Signal()  # one is being merged, the last one
        self.order = Signal(3)  # tiles with pairs that have begun, modulo 8
        m.d.sync += [self.left.eq(self.left - self.fresh), self.number.eq(self.number + self.fresh)]
        self.rest = (self.left - self.fresh)[:32]  # not made yet
        self.next = (self.number + self.fresh)[:_GROUP_BITS]
        ended = self.fresh & ((self.next == 0) | (self.rest == 0))
        self.active = self.tile & (~ended | harness.past(moves(dut.i_tile), "tile_taken"))
        self.idle = (self.left == 0) & ~dut.o.valid
        m.d.sync += self.tile.eq(self.active)
        tile = dut.i_tile.payload
        with m.If(moves(dut.i_tile)):
            m.d.sync += [self.tile.eq(1), self.last.eq(tile.last), self.order.eq(self.order + tile.pairs)]
        with m.If(self.begins):
            m.d.sync += self.left.eq((dut.i_params.payload + (_LANES - 1)) >> 2)
            m.d.sync += [signal.eq(0) for signal in (self.number, self.tile, self.last, self.order)]
        self.had_tile = harness.past(self.active, "had_tile")
        self.had_order = harness.past(self.order, "had_order")
        harness.assume(~moves(dut.i_tile) | (tile.last == (self.rest - self.active <= _GROUPS)))
        harness.assume(~self.begins | (dut.i_params.payload != 0))


class _Pairs:
    """A stream's pairs: of ascending groups in each tile, at least one a tile, the last one perhaps not there."""

    def __init__(self, harness: ProofHarness, pairs: Any, groups: _Groups, k: int) -> None:
        m = harness.m
        self.place: Any = pairs.payload.place
        self.value: Any = pairs.payload.value
        m.d.comb += pairs.valid.eq(harness.free(1, f"i_{k}_valid"))
        m.d.comb += Cat(self.place.as_value(), self.value).eq(harness.free(len(pairs.payload.as_value()), f"i_{k}"))
        item = Cat(self.place.as_value(), self.value)
        self.waits = harness.past(pairs.valid & ~pairs.ready & ~groups.begins, f"waits_{k}")
        harness.assume(~self.waits | (pairs.valid & (item == harness.past(item, f"past_{k}"))))
        self.valid, self.taken = pairs.valid, moves(pairs)
        self.order, self.open, self.top = Signal(3), Signal(), Signal(_GROUP_BITS)  # of those that were taken
        self.group = self.place.index[2:]
        harness.assume(~self.valid | self.place.there | self.place.last)
        harness.assume(~(self.valid & self.open & self.place.there) | (self.group > self.top))
        with m.If(self.taken):
            m.d.sync += [self.order.eq(self.order + self.place.last), self.open.eq(~self.place.last)]
            m.d.sync += self.top.eq(self.group)
        with m.If(groups.begins):
            m.d.sync += [self.order.eq(0), self.open.eq(0)]
        self.mine = (self.order + 1)[:3] == groups.order  # the next pair is of the newest tile with pairs
        self.done = self.order == groups.order
        self.had_valid, self.had_taken = harness.past(self.valid, f"had_{k}"), harness.past(self.taken, f"took_{k}")
        self.had_mine = harness.past(self.mine, f"had_mine_{k}")
        self.had_place: Any = Place(harness.past(self.place.as_value(), f"had_place_{k}"))
        self.had_value = harness.past(self.value, f"had_value_{k}")
        self.had_group = self.had_place.as_value()[2:TILE_BITS]
        self.shows = self.had_taken & self.had_place.there


def build_proof(dut: Any = None) -> ProofHarness:
    """As many groups as the parameters want; a group has those pairs of its tile that are its own, and misses none."""
    dut = PairMerge(_LANES) if dut is None else dut
    harness = ProofHarness(dut)
    offer(harness, dut.i_params, "i_params")
    offer(harness, dut.i_tile, "i_tile")
    accept(harness, dut.o)
    check_source(harness, dut.o)
    groups = _Groups(harness, dut)
    streams = [_Pairs(harness, getattr(dut, f"i_{k}"), groups, k) for k in range(ROW_PAIRS)]
    for k, one in enumerate(streams):
        for other in streams[:k]:
            both = one.valid & other.valid & one.place.there & other.place.there & (one.order == other.order)
            harness.assume(~both | (one.place.index != other.place.index))

    fresh, last, runs = groups.fresh, dut.o.payload.last, groups.rest != 0
    had_runs = harness.past(runs, "had_runs")
    harness.prove("as_many_groups", ~fresh | (groups.left != 0))
    harness.prove("last_group", ~fresh | (last == (groups.left == 1)))
    harness.prove("no_group_without_a_tile", ~fresh | groups.had_tile)
    harness.prove("next_command_when_idle", (dut.i_params.ready == groups.idle) & (dut.idle == groups.idle))
    harness.prove("empty_after_reset", ~harness.was_reset | ~dut.o.valid)
    begins = moves(dut.i_tile)
    harness.prove("a_tile_when_the_one_before_is_done", ~(begins & groups.active) | (groups.next.all() & ~groups.last))
    for k, pairs in enumerate(streams):
        in_its_group = fresh & pairs.had_mine & (pairs.had_group == groups.number)
        harness.prove(f"pair_in_its_group_{k}", ~(had_runs & pairs.shows) | in_its_group)
        later = ~pairs.had_place.there | (pairs.had_group > groups.number)
        harness.prove(f"no_pair_missed_{k}", ~(fresh & pairs.had_mine) | pairs.had_valid & (pairs.had_taken | later))
        harness.prove(f"no_pair_of_a_later_tile_{k}", ~(runs & pairs.taken) | pairs.mine)
        harness.prove(
            f"all_pairs_gone_{k}", ~begins | ((pairs.order + (pairs.taken & pairs.place.last))[:3] == groups.order)
        )
    for lane in range(_LANES):
        expected = Signal(32, name=f"expected_{lane}")
        for pairs in streams:
            with harness.m.If(pairs.shows & (pairs.had_place.index[:2] == lane)):
                harness.m.d.comb += expected.eq(pairs.had_value)
        same = dut.o.payload.data.word_select(lane, 32) == expected
        harness.prove(f"values_at_their_places_{lane}", ~fresh | same)
    settled = Cat(pairs.valid | pairs.done for pairs in streams).all()
    all_done = Cat(pairs.done for pairs in streams).all()
    waits = Signal(range(4))
    moves_on = runs & ~dut.o.valid & settled & (groups.active | ~all_done)
    harness.m.d.sync += waits.eq(Mux(moves_on, waits + ~waits.all(), 0))
    harness.prove("does_not_wait", waits < 3)
    harness.prove("inner_waits_1", (waits != 1) | dut.o.valid | all_done | groups.active)
    harness.prove("inner_waits_2", (waits != 2) | dut.o.valid)
    harness.no_paths += [(streams[0].valid, dut.o.valid), (dut.i_tile.valid, dut.o.valid)]
    shown = [pairs.shows for pairs in streams]
    harness.cover("last_group_of_two_pairs", moves(dut.o) & fresh & last & shown[0] & shown[3])
    harness.cover("a_tile_without_pairs", moves(dut.o) & fresh & (groups.order == 0) & (groups.number == 2))
    _invariants(harness, groups, streams)
    return harness


def _invariants(harness: ProofHarness, groups: _Groups, streams: list[_Pairs]) -> None:
    """Assert what the registers inside hold, by what was seen outside."""
    group = harness.probe("group", _GROUP_BITS)
    runs = groups.rest != 0

    def inner(name: str, condition: Any) -> None:
        harness.prove(f"inner_{name}", ~runs | condition)

    harness.prove("inner_busy", harness.probe("busy", 1) == runs)
    harness.prove("inner_active", harness.probe("active", 1) == (groups.active & runs))
    harness.prove("inner_rests", runs | ~groups.active)
    inner("group", group == groups.next)
    inner("stop", harness.probe("stop", _GROUP_BITS) == (groups.next + groups.rest)[:_GROUP_BITS])
    inner("last", ~groups.active | (harness.probe("last", 1) == groups.last))
    inner("last_groups", ~groups.active | (groups.last == (groups.rest + groups.next <= _GROUPS)))
    inner("no_tile", groups.active | (groups.next == 0))
    pairs_left, done = harness.probe("pairs_left", 1), harness.probe("done", ROW_PAIRS)
    inner("pairs_left", pairs_left == ~Cat(pairs.done for pairs in streams).all())
    for k, pairs in enumerate(streams):
        inner(f"order_{k}", pairs.done | pairs.mine)
        inner(f"done_{k}", done[k] == (pairs_left & pairs.done))
        inner(f"open_{k}", ~pairs.open | pairs.mine)
        new = Mux(pairs.open, (pairs.top + 1 == groups.next) & groups.active, groups.next == 0)
        here = Mux(
            groups.active, pairs.waits | new, (pairs.waits & ~pairs.place.there) | (pairs.open & pairs.top.all())
        )
        inner(f"new_{k}", ~pairs.mine | here)
        waiting = pairs.mine & pairs.waits & pairs.place.there & groups.active
        inner(f"waiting_{k}", ~waiting | (pairs.group >= groups.next))
        inner(f"flush_{k}", groups.active | ~pairs.mine | ~pairs.valid | ~pairs.place.there)


PROOF = Proof(build_proof, engine="induction", depth=2)
