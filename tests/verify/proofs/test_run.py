import pytest
from amaranth import C, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.topk import StreamFault
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.gradients.delta import DeltaPacker
from nearflash.gateware.gradients.header import HeaderCheck
from nearflash.gateware.gradients.pairs import PairMerge
from nearflash.gateware.gradients.tiles import TileCheck
from nearflash.gateware.gradients.values import ValueRows
from nearflash.gateware.weights import levels as level_values
from nearflash.gateware.weights.bitmap import BitmapExpander
from nearflash.gateware.weights.matrix import Part
from nearflash.gateware.weights.pack import LanePack
from nearflash.gateware.weights.popcount import Popcount
from nearflash.gateware.weights.unpack import FieldUnpack
from nearflash.verify.proofs.proof import Proof
from nearflash.verify.proofs.run import run, run_proof
from nearflash.verify.units.bus import read
from nearflash.verify.units.catalogue import choose_proofs, proofs
from nearflash.verify.units.gradients import delta, header, values
from nearflash.verify.units.gradients.pairs import proof as pairs
from nearflash.verify.units.gradients.tiles import proof as tiles
from nearflash.verify.units.stream import skid
from nearflash.verify.units.weights import bitmap, dequantize, levels, pack, popcount, unpack
from nearflash.verify.units.weights.parser import proof as parser

QUICK = ("stream.skid", "stream.gearbox.narrow", "bus.split")


def check(names, folder):
    results = list(run(choose_proofs(names), folder))
    assert {result["mode"] for result in results} >= {"prove", "cover"}
    assert [result for result in results if result["status"] != "pass"] == []


@pytest.mark.parametrize("name", QUICK)
def test_quick_proofs(name, tmp_path):
    check([name], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in proofs() if name not in QUICK])
def test_long_proofs(name, tmp_path):
    check([name], tmp_path)


class Careless(wiring.Component):
    """Seeded bug: a register that takes an item whether or not the last one has left."""

    i: In(stream.Signature(1))
    o: Out(stream.Signature(1))

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.i.ready.eq(1)
        with m.If(self.i.valid):
            m.d.sync += [self.o.payload.eq(self.i.payload), self.o.valid.eq(1)]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m


class Waiting(wiring.Component):
    """Seeded bug: no item is offered before the consumer is ready."""

    i: In(stream.Signature(1))
    o: Out(stream.Signature(1))

    def elaborate(self, platform):
        m = Module()
        m.d.comb += [
            self.o.payload.eq(self.i.payload),
            self.o.valid.eq(self.i.valid & self.o.ready),
            self.i.ready.eq(self.o.ready),
        ]
        return m


def results_of(build, folder, **options):
    return {result["mode"]: result for result in run_proof("seeded", Proof(build, **options), folder)}


def fails(build, folder, depth):
    """Names of the properties that do not hold in the first `depth` cycles."""
    result = next(run_proof("seeded", Proof(build, engine="bounded", depth=depth), folder))
    assert result["status"] == "fail"
    return set(result["property"])


def test_a_lost_item_fails_by_name_with_a_trace(tmp_path):
    result = results_of(lambda: skid.build_proof(Careless()), tmp_path)["prove"]
    assert result["status"] == "fail"
    assert set(result["property"]) & {"o_payload_stable_until_ready", "order_kept", "capacity_kept"}
    assert "o__payload" in (tmp_path / result["trace"]).read_text()


def test_valid_that_waits_for_ready_fails(tmp_path):
    result = results_of(lambda: skid.build_proof(Waiting()), tmp_path)["paths"]
    assert result["status"] == "fail"
    assert "no_path_from_o__ready_to_o__valid" in result["property"]


def test_a_crossed_boundary_fails(tmp_path, monkeypatch):
    # Seeded bug: bursts of 8 beats on a bus whose boundary lies every 4.
    monkeypatch.setattr(
        read, "BurstReader", lambda width, **_: BurstReader(width, max_outstanding=2, max_burst_bytes=32)
    )
    result = results_of(read.build_proof, tmp_path)["prove"]
    assert result["status"] == "fail"
    assert "ar_no_crossing" in result["property"]


@pytest.mark.full
def test_entries_that_narrow_codes_do_not_have_fail(tmp_path, monkeypatch):
    # Seeded bug: of a codebook for codes of one bit an entry too many counts.
    monkeypatch.setattr(level_values, "_NARROW_ENTRIES", level_values._NARROW_ENTRIES + 1)
    assert "a_word_of_what_was_taken" in fails(levels.build_proof, tmp_path, 24)


class Packed(BitmapExpander):
    """Seeded bug: a row's values begin where those of the row before end, within a word."""

    def _values(self, m, count, last, taken, lacks):
        return super()._values(m, count, C(0), taken, lacks)


@pytest.mark.full
def test_values_at_other_places_fail(tmp_path):
    failed = fails(lambda: bitmap.build_proof(Packed(4, 8)), tmp_path, depth=9)
    assert failed & {"values_at_their_places", "inner_place", "inner_words"}


class Lenient(HeaderCheck):
    """Seeded bug: any magic and version will do."""

    def _compare(self, m, number, command, wrong):
        super()._compare(m, number, command, wrong)
        with m.If(number == 0):
            m.d.sync += wrong.magic.eq(0)


def test_a_fault_without_its_name_fails(tmp_path):
    failed = fails(lambda: header.build_proof(Lenient()), tmp_path, depth=9)
    assert failed & {"start_names_the_fault", "inner_magic"}


class Forgetful(DeltaPacker):
    """Seeded bug: what changed in the last group of a delta is not counted."""

    def _fill(self, m, kept, running):
        super()._fill(m, kept, running)
        with m.If(self.i.valid & self.i.ready & self.i.payload.last):
            m.d.sync += [count.eq(0) for count in kept.counts]


@pytest.mark.full
def test_a_delta_without_its_last_changes_fails(tmp_path):
    failed = fails(lambda: delta.build_proof(Forgetful(4, 4)), tmp_path, depth=14)
    assert failed & {"words_of_a_tile", "states_what_changed"}


class Leaking(PairMerge):
    """Seeded bug: the first stream's pair reaches its lane in every group."""

    def _lanes(self, m, hits, heads, ready):
        super()._lanes(m, hits | heads[0].payload.place.there, heads, ready)


@pytest.mark.full
def test_pairs_of_another_group_fail(tmp_path):
    failed = fails(lambda: pairs.build_proof(Leaking(4)), tmp_path, depth=6)
    assert failed & {f"values_at_their_places_{lane}" for lane in range(4)}


class Trusting(TileCheck):
    """Seeded bug: a count that cannot be is no fault."""

    def _tile_word(self, m, tile):
        super()._tile_word(m, tile)
        m.d.sync += self.fault.eq(StreamFault.NONE)


def test_a_fault_that_is_not_found_fails(tmp_path):
    failed = fails(lambda: tiles.build_proof(Trusting()), tmp_path, depth=5)
    assert "the_first_fault_stands" in failed


class Halved(ValueRows):
    """Seeded bug: a row goes as soon as half of it is there."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += self.o.valid.eq(1)
        return m


@pytest.mark.full
def test_half_a_row_fails(tmp_path):
    failed = fails(lambda: values.build_proof(Halved()), tmp_path, depth=5)
    assert "a_row_for_four_values" in failed


class Overwriting(LanePack):
    """Seeded bug: a group is taken while a word waits."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        m.d.comb += self.i.ready.eq(1)
        return m


@pytest.mark.full
def test_a_word_that_is_overwritten_fails(tmp_path):
    failed = fails(lambda: pack.build_proof(Overwriting(2, 64)), tmp_path, depth=6)
    assert failed & {"takes_a_group_when_there_is_room", "o_payload_stable_until_ready"}


class Greedy(FieldUnpack):
    """Seeded bug: the word stays where a count ends within it, and the next count begins there."""

    def elaborate(self, platform):
        m = super().elaborate(platform)
        with m.If(self.i_count.ready & self.i.valid):
            m.d.comb += self.i.ready.eq(0)
        return m


@pytest.mark.full
def test_a_count_that_begins_within_a_word_fails(tmp_path):
    failed = fails(lambda: unpack.build_proof(Greedy(2, 32, (4, 8, 16), lane_bits=16, count_bits=5)), tmp_path, depth=6)
    assert failed & {"a_word_when_it_is_used_up", "words_are_counted"}


class Unmasked(Popcount):
    """Seeded bug: what lies behind the section counts."""

    def _there(self, m):
        super()._there(m)
        return C(-1, self.port_bits)


@pytest.mark.full
def test_bits_behind_a_section_fail(tmp_path):
    failed = fails(lambda: popcount.build_proof(Unmasked(64, 512)), tmp_path, depth=8)
    assert failed & {"count_of_all_words", "beyond_tells", "same_bits"}


class Losing(parser.CountingParser):
    """Seeded bug: a word is taken although its section's stream does not."""

    def _route(self, m, now):
        super()._route(m, now)
        m.d.comb += self.i.ready.eq(1)


@pytest.mark.full
def test_a_word_of_a_section_that_is_lost_fails(tmp_path):
    failed = fails(lambda: parser.build_proof(Losing()), tmp_path, depth=12)
    assert failed & {"bitmap_moves_once", "o_bitmap_valid_until_ready", "o_bitmap_payload_stable_until_ready"}


class Forgiving(parser.CountingParser):
    """Seeded bug: a header that is wrong is no fault."""

    def _find_fault(self, m, now, header, crc):
        found = super()._find_fault(m, now, header, crc)
        with m.If(now.part == Part.HEADER):
            m.d.comb += found.eq(StreamFault.NONE)
        return found


@pytest.mark.full
def test_a_matrix_without_its_header_fails(tmp_path):
    failed = fails(lambda: parser.build_proof(Forgiving()), tmp_path, depth=9)
    assert failed & {"the_first_fault_stands", "inner_drain"}


class Late(dequantize.ShortDequantizer):
    """Seeded bug: a beat goes with the scale of the one before."""

    def _take(self, m):
        super()._take(m)
        group = self._pipeline.i.payload.group
        before = Signal.like(group)
        m.d.sync += before.eq(self.i_scale.payload)
        m.d.comb += group.eq(before)


@pytest.mark.full
def test_another_scale_fails(tmp_path):
    failed = fails(lambda: dequantize.build_proof(Late(4)), tmp_path, depth=6)
    assert "same_elements" in failed


def test_what_cannot_be_reached_is_not_covered(tmp_path):
    def build():
        harness = skid.build_proof()
        harness.assume(harness.dut.o.ready)
        return harness

    result = results_of(build, tmp_path)["cover"]
    assert result["status"] == "fail"
    assert {"full", "o_waits_then_moves"} <= set(result["property"])
