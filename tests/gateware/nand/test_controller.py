"""The controller against the model of NAND, which checks grammar and waits of every bus cycle by itself."""

import re
from dataclasses import replace

import numpy as np
import pytest

from nearflash.gateware.nand.controller import NandController
from nearflash.sim.nand.parts import nand_part
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.nand_controller import ControllerBench, Operation, PageRead

CLOCK_HZ = 285_000_000
UNITS = 4
PART = replace(nand_part("slc-1400"), pages_per_block=16)
ROWS = 32


@pytest.fixture(scope="module", params=["cached", "shared_enables", pytest.param("single", marks=pytest.mark.full)])
def bench(request):
    options = {request.param: True} if request.param != "single" else {}
    return ControllerBench(PART, UNITS, CLOCK_HZ, f"test_nand_{request.param}", **options)


@pytest.fixture
def pages(bench):
    """What the first ROWS rows of every lun store, anew for each test: (lun, row, codeword, byte)."""
    found = np.random.default_rng(7).integers(0, 256, (UNITS, ROWS, 8, 552), np.uint8)
    bench.channel.configure(replace(bench.model, luns=1))  # forget everything
    bench.channel.configure(bench.model)
    for lun in range(UNITS):
        bench.channel.load(lun, np.arange(ROWS), found[lun].reshape(ROWS, -1))
    bench.channel.statistics(clear=True)
    return found


def random_reads(count, seed):
    rng = np.random.default_rng(seed)
    masks = [int(rng.integers(1, 1 << int(rng.choice([4, 8, 16])))) for _ in range(count)]
    return [PageRead(int(rng.integers(UNITS)), int(rng.integers(ROWS)), mask) for mask in masks]


def check(answers, reads, pages):
    assert sorted(answer.index for answer in answers) == list(range(len(reads)))
    for answer in answers:
        read = reads[answer.index]
        assert not answer.failed
        for number, found in answer.codewords.items():
            assert np.array_equal(found, pages[read.lun ^ number // 8, read.row, number % 8]), (read, number)


@pytest.mark.parametrize("stalls", [name for name in STALLS if name != "bursty"])
def test_gives_exactly_the_codewords_of_the_masks(bench, pages, stalls):
    reads = random_reads(100, seed=3)
    answers, _ = bench.run(reads, stalls=stalls, seed=11)
    check(answers, reads, pages)
    codewords = sum(read.codewords.bit_count() for read in reads)
    counted = bench.channel.statistics()
    assert counted.read_beats - counted.polls == codewords * 69  # nothing else crosses the link


def test_requests_of_ready_units_overtake(bench, pages):
    reads = [PageRead(0, row, 0xFF) for row in range(8)] + [PageRead(3, 0, 0x01)]
    answers, _ = bench.run(reads)
    check(answers, reads, pages)
    order = [answer.index for answer in answers]
    assert [index for index in order if index != 8] == list(range(8))  # one lun: as they came
    assert order.index(8) < 4


def test_siblings_in_both_orders_do_not_block_each_other(bench, pages):
    reads = [PageRead(at & 1, at % ROWS, 0x0101) for at in range(60)]
    answers, _ = bench.run(reads)
    check(answers, reads, pages)


def test_pages_of_other_sizes(bench, pages):
    reads = [PageRead(1, 3, 0b1111), PageRead(2, 4, 0b0110), PageRead(0, 5, 0b1000)]  # two codewords a page
    answers, _ = bench.run(reads, page_codewords=2)
    for answer in answers:
        read = reads[answer.index]
        for number, found in answer.codewords.items():
            assert np.array_equal(found, pages[read.lun ^ number // 2, read.row, number % 2])


def test_programs_erases_and_reads_back_while_others_are_read(bench, pages):
    fresh = np.random.default_rng(1).integers(0, 256, (2, 8, 552), np.uint8)
    operations = [Operation(0, 3), Operation(0, 0, fresh[0]), Operation(0, 15, fresh[1]), Operation(1, 40)]
    reads = [PageRead(2 + at % 2, at % ROWS, 0xFF) for at in range(300)]
    answers, results = bench.run(reads, operations, stalls="both", seed=5, timeout_cycles=2_000_000)
    check(answers, reads, pages)
    assert {result["lun"]: 0 for result in results} == {0: 0, 1: 0} and len(results) == 4
    assert not any(result["failed"] or result["timeout"] for result in results)
    assert [result["erase"] for result in results if result["lun"] == 0] == [1, 0, 0]
    counted = bench.channel.statistics()
    assert (counted.programs, counted.erases, counted.reads) == (2, 2, 300)
    again, _ = bench.run([PageRead(0, 0, 0xFF), PageRead(0, 15, 0x80), PageRead(0, 1, 1)])
    found = {answer.index: answer.codewords for answer in again}
    assert np.array_equal(np.stack(list(found[0].values())), fresh[0])
    assert np.array_equal(found[1][7], fresh[1][7])
    assert (found[2][0] == 0xFF).all()  # the erase took the other pages of the block
    assert bench.channel.block_erases(0, 0) == 1 and bench.channel.block_reads(0, 0) == 3


def test_a_bad_block_fails_by_name(bench, pages):
    bench.channel.spoil(1, 2)
    data = np.zeros((8, 552), np.uint8)
    _, results = bench.run([], [Operation(1, 32), Operation(1, 47, data), Operation(1, 48)], timeout_cycles=2_000_000)
    assert [(result["erase"], result["failed"]) for result in results] == [(1, 1), (0, 1), (1, 0)]


def test_a_dead_unit_costs_its_own_pages_only(bench, pages):
    bench.channel.stick(2)
    reads = [PageRead(at % UNITS, at % ROWS, 0x0111) for at in range(12)]
    try:
        data = np.random.default_rng(3).integers(0, 256, (3, 8, 552), np.uint8)
        operations = [
            Operation(2, 100, data[0], begins=False),
            Operation(2, 0),
            Operation(2, 101, data[1], begins=False),
            Operation(0, 99, data[2]),
        ]
        answers, results = bench.run(reads, operations, timeout_cycles=2_000_000)
    finally:
        bench.channel.stick(2, -1)
    assert [(result["number"], result["lun"], result["erase"], result["timeout"]) for result in results] == [
        *((0, 2, 0, 1), (1, 2, 1, 1), (2, 2, 0, 1), (3, 0, 0, 0))
    ]
    assert np.array_equal(bench.channel.page(0, 99)[: 8 * 552], data[2].reshape(-1))
    assert sorted(answer.index for answer in answers) == list(range(12))
    for answer in answers:
        read = reads[answer.index]
        dead = {number for number in answer.codewords if read.lun ^ number // 8 == 2}
        assert answer.failed == dead
        for number in dead:
            assert not answer.codewords[number].any()
        for number in set(answer.codewords) - dead:
            assert np.array_equal(answer.codewords[number], pages[read.lun ^ number // 8, read.row, number % 8])


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_unit_may_die_at_any_time(bench, pages, after):
    bench.channel.stick(3, after)  # its reset is the first command
    reads = [PageRead(3, row, 0x0081) for row in range(4)] + [PageRead(0, 0, 1)]
    try:
        answers, results = bench.run(reads, [Operation(3, 100)], timeout_cycles=4_000_000)
    finally:
        bench.channel.stick(3, -1)
    found = {answer.index: answer.failed for answer in answers}
    assert len(found) == 5 and not found[4]
    lost = sum(bool(failed) for failed in found.values()) + results[0]["timeout"]
    assert lost - (6 - after) in (0, 1)  # a sensed page that cannot be turned is lost too


def test_a_unit_that_comes_back_is_used_again(bench, pages):
    bench.channel.stick(1)
    try:
        bench.run([PageRead(1, 0, 1)], timeout_cycles=2_000_000)
    finally:
        bench.channel.stick(1, -1)
    reads = [PageRead(1, 0, 0xFF)]
    check(bench.run(reads, timeout_cycles=2_000_000)[0], reads, pages)


def test_raw_bit_errors_arrive_at_their_rate(bench, pages):
    rate = 1e-3
    bench.channel.configure(replace(bench.model, bit_error_rate=rate, seed=9))
    reads = random_reads(200, seed=5)
    answers, _ = bench.run(reads)
    wrong = bits = 0
    for answer in answers:
        read = reads[answer.index]
        for number, found in answer.codewords.items():
            stored = pages[read.lun ^ number // 8, read.row, number % 8]
            wrong += int(np.unpackbits(found ^ stored).sum())
            bits += found.size * 8
    assert wrong == pytest.approx(rate * bits, rel=0.1)


def spoken(channel):
    """The log as text: commands as `00h`, addresses as their bytes, data as `R` and `W`, a lun a line."""
    words: dict[int, list[str]] = {}
    for lun, kind, byte in channel.log().tolist():
        words.setdefault(lun, []).append((f"{byte:02X}h", f"{byte:02X}", "R", "W")[kind])
    return {lun: " ".join(line) for lun, line in words.items()}


def said_after_reset(channel):
    """What lun 0 heard; a status that is asked by row is written as one that is not."""
    return re.sub(r"78h .. .. ..", "70h", spoken(channel)[0]).removeprefix("FFh 70h R ")


GOLDEN = {
    "page": ([PageRead(0, 0x0201, 0xFF)], [], "00h 00 00 01 02 00 30h 70h R 06h 00 00 01 02 00 E0h R"),
    "runs": ([PageRead(0, 5, 0b11001010)], [], "00h 00 00 05 00 00 30h 70h R 06h 28 02 05 00 00 E0h R "
             "05h 78 06 E0h R 05h F0 0C E0h R"),
    "program": ([], [Operation(0, 600, np.zeros((2, 552), np.uint8))], "80h 00 00 58 02 00 W 10h 70h R"),
    "erase": ([], [Operation(0, 600)], "60h 58 02 00 D0h 70h R"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_command_sequences(bench, pages, name):
    reads, operations, golden = GOLDEN[name]
    bench.channel.start_log()
    bench.run(reads, operations, timeout_cycles=2_000_000)
    assert said_after_reset(bench.channel) == golden


def test_units_with_shared_enables_are_asked_by_row_and_not_mixed(bench, pages, request):
    reads = [PageRead(at % UNITS, at % ROWS, 0b10101) for at in range(40)]
    bench.channel.start_log()
    check(bench.run(reads)[0], reads, pages)
    cycles = bench.channel.log()
    bytes_said = {byte for _, kind, byte in cycles.tolist() if kind == 0}
    changes = [at for at, (_, kind, byte) in enumerate(cycles.tolist()) if kind == 0 and byte == 0xE0]
    mixed = sum(cycles[at + 1, 1] != 2 for at in changes)  # what comes next is no data out
    assert (0x78 in bytes_said) == request.node.name.endswith("[shared_enables]")
    if 0x78 in bytes_said:
        assert not mixed and 0x70 not in bytes_said
    else:
        assert mixed > 10


def test_sequence_of_neighbouring_reads(bench, pages):
    bench.channel.start_log()
    bench.run([PageRead(0, row, 1) for row in range(3)])
    said = said_after_reset(bench.channel)
    one, cached = "00h 00 00 0{} 00 00 {}h 70h R", "31h" in said
    out = "06h 00 00 0{} 00 00 E0h R"
    if cached:
        golden = [
            one.format(0, 30),
            one.format(1, 31),
            out.format(0),
            one.format(2, 31),
            out.format(1),
            "3Fh 70h R",
            out.format(2),
        ]
    else:
        golden = [text for row in range(3) for text in (one.format(row, 30), out.format(row))]
    assert said == " ".join(golden)


def test_the_channel_is_kept_busy():
    bench = ControllerBench(PART, 16, CLOCK_HZ, "test_nand_16")
    rng = np.random.default_rng(5)
    for mask, data in ((0xFF, 0.76), (0x11, 0.40)):
        reads = [PageRead(int(rng.integers(16)), int(rng.integers(ROWS)), mask) for _ in range(400)]
        bench.run(reads[:40])
        bench.channel.statistics(clear=True)
        bench.run(reads)
        counted = bench.channel.statistics()
        assert counted.busy > 0.95 and counted.data > data
        assert counted.polls <= 1.1 * counted.reads + 16


@pytest.mark.parametrize("luns", [1, 3, 128])
def test_units_must_be_a_power_of_two(luns):
    with pytest.raises(ValueError, match=rf"^luns must be a power of two, 2 to 64, not {luns}$"):
        NandController(luns, PART.timing, CLOCK_HZ, tag=20)
