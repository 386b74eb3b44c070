"""Coded weights through the whole kernel on Verilator: against the model, at full rate, with faults everywhere."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, SECTION_BYTES, ElementFormat
from nearflash.abi.coded import CodedHeader
from nearflash.abi.crc import crc32c
from nearflash.abi.errors import CommandError, StreamError
from nearflash.abi.kernel.config import expand_config
from nearflash.abi.topk import StreamFault
from nearflash.device.drivers.expand import expand_command, expand_matrix
from nearflash.device.selftest.expand import CODED_FORMATS, MATRIX_FORMATS, levels_name, random_coded, random_matrix
from nearflash.model.weights.bitmap import expand
from nearflash.model.weights.levels import expand_levels, read_blocks
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.verify.fixtures.matrices import damage, header_of, odd, outcome

pytestmark = pytest.mark.full
CONFIG = expand_config("expand-tiny-levels")
UNTOUCHED = 0xEE
each_format = pytest.mark.parametrize("form", CODED_FORMATS, ids=lambda form: levels_name(form).replace(" ", "-"))


@pytest.fixture(scope="module")
def device():
    with VerilatorDevice(CONFIG, memory_bytes=1 << 22) as opened:
        yield opened


@pytest.fixture(scope="module")
def wide():
    with VerilatorDevice(expand_config("expand-smartssd-levels"), memory_bytes=1 << 23) as opened:
        yield opened


def check_equality(device, form, sizes):
    rng = np.random.default_rng(1)
    for elements, block, group_blocks in sizes:
        for density in (0.0, 0.4, 1.0):
            stream = random_coded(rng, elements, density, form, block, group_blocks)
            done = expand_matrix(device, stream)
            np.testing.assert_array_equal(done.dense, expand_levels(stream))
            blocks = list(read_blocks(stream))
            assert done.counters["rows_done"] == len(blocks)
            assert done.counters["elements_done"] == elements
            assert done.counters["values_done"] == sum(values for _, values in blocks)


@each_format
def test_equals_the_model(stalled, form):
    """Blocks that end in every kind of place, groups of one block and of several, densities from none to all."""
    check_equality(stalled, form, ((1, 1024, 1), (210, 70, 2), (1024, 512, 1), (1539, 513, 4), (2500, 1024, 2)))


@each_format
def test_damaged_weights_are_named_and_nothing_is_written_from_their_fault_on(stalled, form):
    """Cuts, every byte of the header, single bits: fault and blocks are the model's, and the next ones are good."""
    rng = np.random.default_rng(2)
    good = random_coded(rng, 390, 0.5, form, 130, 2)
    header, dense = header_of(good), expand_levels(good)
    command = expand_command(header, 0, 0)
    source, target = stalled.allocate(2 * len(good)), stalled.allocate(command.out_bytes)
    command = replace(command, in_address=source.address, out_address=target.address)
    for stream in [*damage(good, rng, flips=40), good]:
        source.host[: len(stream)] = np.frombuffer(stream, np.uint8)
        source.sync_to_device()
        target.p2p[:] = UNTOUCHED
        fault, blocks = outcome(stream, header)
        try:
            stalled.run(replace(command, in_bytes=len(stream)))
            assert fault is StreamFault.NONE
        except StreamError as error:
            assert error.fault == fault
        assert (target.p2p[blocks * command.row_bytes :] == UNTOUCHED).all()
        assert not blocks or (target.p2p[: blocks * command.row_bytes].reshape(blocks, -1) != UNTOUCHED).any(1).all()
    np.testing.assert_array_equal(expand_matrix(stalled, good).dense, dense)
    stalled.free(source)
    stalled.free(target)


@each_format
def test_odd_weights_are_read_as_the_model_reads_them(stalled, form):
    """Bits changed under a right checksum: levels of other lengths, codes that no writer writes; nothing hangs."""
    rng, read = np.random.default_rng(8), []
    for elements in (200, 508):
        good = random_coded(rng, 2 * elements, 0.6, form, elements, 2)
        for stream in (*odd(good, rng, 15), *scrambled(good, rng, 15)):
            fault, _ = outcome(stream, header_of(good))
            try:
                dense = expand_matrix(stalled, stream).dense
            except StreamError as error:
                assert error.fault == fault
            else:
                assert fault is StreamFault.NONE
                np.testing.assert_array_equal(dense, expand_levels(stream))
            read.append(fault is StreamFault.NONE)
    assert 5 < sum(read) < 55


def scrambled(stream, rng, count):
    """Anything behind the codebook of the only group, under a right checksum: levels are of any lengths."""
    for _ in range(count):
        body = bytearray(stream[HEADER_BYTES:-SECTION_BYTES])
        body[SECTION_BYTES:] = bytes(rng.integers(0, 256, len(body) - SECTION_BYTES, np.uint8) | rng.integers(256))
        yield stream[:HEADER_BYTES] + body + GROUP_END.pack(0, crc32c(bytes(body)))


@each_format
def test_a_group_a_cycle(device, form):
    """What comes before a block's values does not show: as many cycles as groups, but for a command's ends."""
    check_rate(device, form, blocks=2)


def check_rate(device, form, blocks):
    width = device.identity.config.width
    groups, cycles = blocks * 65536 // width, []
    for times in (1, 2):
        rng = np.random.default_rng(3)
        stream = random_coded(rng, times * blocks * 65536, 0.5, form, 65536, 4)
        cycles.append(expand_matrix(device, stream).counters["cycles"])
    print(levels_name(form), groups / (cycles[1] - cycles[0]))
    assert groups <= cycles[1] - cycles[0] < 1.005 * groups


def test_matrices_are_expanded_by_the_same_build(device):
    rng = np.random.default_rng(4)
    for matrix_form, coded_form in zip(MATRIX_FORMATS, (*CODED_FORMATS, CODED_FORMATS[0]), strict=True):
        stream, coded = random_matrix(rng, (3, 300), 0.5, matrix_form), random_coded(rng, 600, 0.5, coded_form, 300)
        np.testing.assert_array_equal(expand_matrix(device, stream).dense, expand(stream))
        np.testing.assert_array_equal(expand_matrix(device, coded).dense, expand_levels(coded))


def test_a_reset_in_a_command_leaves_nothing_behind(device):
    rng = np.random.default_rng(5)
    streams = [random_coded(rng, 6000, 0.5, form, 1000, 2) for form in CODED_FORMATS]
    for cycles in range(20, 1400, 170):
        stream = streams[cycles % len(streams)]
        source, target = device.allocate(len(stream)), device.allocate(1 << 14)
        source.p2p[:] = np.frombuffer(stream, np.uint8)
        device.submit(expand_command(header_of(stream), source.address, target.address))
        device.kernel.advance(cycles)
        device.reset()
        np.testing.assert_array_equal(expand_matrix(device, streams[0]).dense, expand_levels(streams[0]))
        device.free(source)
        device.free(target)


@pytest.mark.parametrize("element", [ElementFormat.FP16, ElementFormat.BF16])
def test_the_longest_sections_have_room(device, element):
    """Every code of two whole blocks leads on to an escape."""
    header = CodedHeader(element, 2, False, 2 << 16, 1 << 16, 2, 0)
    sizes = sum((1 << 16) * bits // 8 for bits in header.sections.values())
    body = bytes(SECTION_BYTES) + b"\xff" * 2 * sizes
    stream_bytes = HEADER_BYTES + len(body) + SECTION_BYTES
    stream = replace(header, stream_bytes=stream_bytes).pack() + body + GROUP_END.pack(0, crc32c(body))
    done = expand_matrix(device, stream)
    assert (done.dense == 0xFFFF).all()
    assert done.counters["values_done"] == 2 << 16


@each_format
def test_wide_words_equal_the_model(wide, form):
    """16 elements a cycle, a block a word; at full rate, too."""
    check_equality(wide, form, ((1, 1024, 1), (210, 70, 2), (70_000, 65536, 4)))
    check_rate(wide, form, blocks=2)


def test_a_build_without_it_refuses_before_it_starts():
    stream = random_coded(np.random.default_rng(6), 300, 1, CODED_FORMATS[0], 300)
    with pytest.raises(CommandError, match=r"format must be plain16 or .* on expand-tiny, not levels_fp16"):
        expand_command(header_of(stream), 0, 0).check(expand_config("expand-tiny"))
