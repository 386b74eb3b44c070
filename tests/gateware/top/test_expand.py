"""The whole kernel on Verilator: against cocotb's AXI models and the model, at full rate, with faults everywhere."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import DeviceError, StreamError, WaitTimeoutError
from nearflash.abi.kernel.config import expand_config
from nearflash.abi.topk import StreamFault
from nearflash.device.drivers.expand import expand_command, expand_matrix
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.model.weights.bitmap import expand, read_rows
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.kernel import MemoryModel
from nearflash.verify.cocotb.run import run_testbench
from nearflash.verify.fixtures.matrices import damage, header_of, odd, outcome

CONFIG = expand_config("expand-tiny")
FP16_PLAIN = MATRIX_FORMATS[0]
UNTOUCHED = 0xEE
each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))


@pytest.fixture(scope="module")
def device():
    with VerilatorDevice(CONFIG, memory_bytes=1 << 22) as opened:
        yield opened


@pytest.fixture(scope="module")
def wide():
    with VerilatorDevice(expand_config("expand-smartssd"), memory_bytes=1 << 22) as opened:
        yield opened


@pytest.mark.full  # a simulator of its own, two minutes to build and to run
def test_testbench():
    result = run_testbench("gateware.top.expand")
    assert result.failed == ()
    assert len(result.passed) == 3


@each_format
def test_equals_the_model(stalled, form):
    """Rows that end in every kind of place, groups of one row and of all, densities from none to all."""
    rng = np.random.default_rng(1)
    for shape, group_rows in (((1, 1), 1), ((3, 70), 2), ((2, 512), 1), ((4, 513), 4), ((3, 1024), 2)):
        for density in (0.0, 0.4, 1.0):
            stream = random_matrix(rng, shape, density, form, group_rows)
            done = expand_matrix(stalled, stream)
            np.testing.assert_array_equal(done.dense, expand(stream))
            assert done.counters["elements_done"] == shape[0] * shape[1]
            assert done.counters["values_done"] == sum(row.present.sum() for row in read_rows(stream))


@each_format
def test_a_damaged_matrix_is_named_and_nothing_is_written_from_its_fault_on(stalled, form):
    """Every cut, every byte of the header, single bits: fault and rows are the model's, and the next matrix is good."""
    rng = np.random.default_rng(2)
    good = random_matrix(rng, (3, 130), 0.5, form, 2)
    header, dense = header_of(good), expand(good)
    command = expand_command(header, 0, 0)
    source, target = stalled.allocate(2 * len(good)), stalled.allocate(command.out_bytes)
    command = replace(command, in_address=source.address, out_address=target.address)
    for stream in [*damage(good, rng, flips=40), good]:
        source.host[: len(stream)] = np.frombuffer(stream, np.uint8)
        source.sync_to_device()
        target.p2p[:] = UNTOUCHED
        fault, rows = outcome(stream, header)
        try:
            stalled.run(replace(command, in_bytes=len(stream)))
            assert fault is StreamFault.NONE
        except StreamError as error:
            assert error.fault == fault
        written = target.p2p.reshape(command.rows, command.row_bytes)
        assert (written[rows:] == UNTOUCHED).all()
        assert (written[:rows] != UNTOUCHED).any(axis=1).all()
    np.testing.assert_array_equal(written.view(dense.dtype)[:, : header.columns], dense)
    stalled.free(source)
    stalled.free(target)


def check_odd_matrices(device, form):
    """Bits changed under a right checksum: what is still a matrix is expanded, what is not is named, nothing hangs."""
    rng, read = np.random.default_rng(8), []
    for columns in (200, 508):  # much padding in a bitmap, and little
        good = random_matrix(rng, (3, columns), 0.6, form, 3)
        for stream in odd(good, rng, 40):
            fault, _ = outcome(stream, header_of(good))
            try:
                dense = expand_matrix(device, stream).dense
            except StreamError as error:
                assert error.fault == fault
            else:
                assert fault is StreamFault.NONE
                np.testing.assert_array_equal(dense, expand(stream))
            read.append(fault is StreamFault.NONE)
    assert 20 < sum(read) < 60


@each_format
def test_odd_matrices_are_read_as_the_model_reads_them(stalled, form):
    check_odd_matrices(stalled, form)


@each_format
def test_a_group_a_cycle(device, form):
    """What comes before a row's values does not show: as many cycles as groups, and what begins and ends a command."""
    stream = random_matrix(np.random.default_rng(3), (12, 1024), 0.5, form, 12)
    groups = 12 * 1024 // CONFIG.width
    assert groups < expand_matrix(device, stream).counters["cycles"] < 1.02 * groups + 300


def test_a_reset_in_a_command_leaves_nothing_behind(device):
    rng = np.random.default_rng(4)
    streams = [random_matrix(rng, (6, 1000), 0.5, form, 2) for form in MATRIX_FORMATS]
    for cycles in range(20, 1400, 170):
        stream = streams[cycles % len(streams)]
        source, target = device.allocate(len(stream)), device.allocate(1 << 14)
        source.p2p[:] = np.frombuffer(stream, np.uint8)
        device.submit(expand_command(header_of(stream), source.address, target.address))
        device.kernel.advance(cycles)
        device.reset()
        np.testing.assert_array_equal(expand_matrix(device, streams[0]).dense, expand(streams[0]))
        device.free(source)
        device.free(target)


def test_a_memory_that_stands_still_is_named(device):
    stream = random_matrix(np.random.default_rng(5), (2, 600), 0.5, FP16_PLAIN)
    device.kernel.configure(MemoryModel(stall_percent=100))
    with pytest.raises(WaitTimeoutError, match=r"m_axi_gmem0\.ar waits for ready"):
        expand_matrix(device, stream)
    device.kernel.configure(MemoryModel())
    device.reset()
    np.testing.assert_array_equal(expand_matrix(device, stream).dense, expand(stream))


@pytest.mark.parametrize(("place", "name"), [("in_address", "READ_ERROR"), ("out_address", "WRITE_ERROR")])
def test_memory_that_answers_with_an_error_is_named(device, place, name):
    """Past the checks of submit: addresses that no memory answers."""
    stream = random_matrix(np.random.default_rng(6), (2, 100), 0.5, FP16_PLAIN)
    source, target = device.allocate(len(stream)), device.allocate(4096)
    source.p2p[:] = np.frombuffer(stream, np.uint8)
    command = expand_command(header_of(stream), source.address, target.address)
    device._start(replace(command, **{place: 0x40}))
    with pytest.raises(
        DeviceError, match=f"verilator:expand-tiny ended with {name} at address 0x40: the memory rejected"
    ):
        device._finish(60)
    device.free(source)
    device.free(target)
    np.testing.assert_array_equal(expand_matrix(device, stream).dense, expand(stream))


@pytest.mark.full
@each_format
def test_wide_words_equal_the_model(wide, form):
    """16 elements a cycle, a block a word, rows of a large model."""
    rng = np.random.default_rng(7)
    for shape, group_rows in (((1, 1), 1), ((3, 70), 2), ((4, 9216), 4)):
        stream = random_matrix(rng, shape, 0.5, form, group_rows)
        np.testing.assert_array_equal(expand_matrix(wide, stream).dense, expand(stream))
    check_odd_matrices(wide, form)
