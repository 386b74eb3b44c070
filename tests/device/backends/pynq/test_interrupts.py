"""Completion by interrupt: the driver on a Verilated kernel whose interrupt line is a file."""

import numpy as np
import pytest

from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep
from nearflash.device.backends.pynq.device import PynqDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.device.selftest.update import UpdateVector, random_state, run_update

board = pytest.importorskip("nearflash.verify.fixtures.boards.kernel")


class Line:
    """Waits as /dev/uio does: until the simulated kernel's line is high."""

    def __init__(self, kernel):
        self.kernel, self.waits, self.closed = kernel, [], False

    def wait(self, timeout_s):
        self.kernel.kernel.advance(100_000, until_interrupt=True)
        self.waits.append(self.kernel.kernel.interrupt)
        return self.waits[-1]

    def close(self):
        self.closed = True


class Words:
    """What pynq.MMIO is to the driver."""

    def __init__(self, kernel):
        self.read, self.write = kernel.read, kernel.write


class Simulated(SimulatedMemory):
    def close(self):
        pass


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(board, "POLL_CYCLES", 1)
    made = board.BoardKernel(CONFIGS["update-tiny"], 1 << 24)
    yield made
    made.close()


def test_the_driver_sleeps_until_the_line_is_high_and_lowers_it(kernel):
    memory = Simulated(base=kernel.memory.base, storage=kernel.memory.storage)
    line = Line(kernel)
    with PynqDevice(CONFIGS["update-tiny"], Words(kernel), memory, line) as device:
        for step in (1, 2):
            vector = UpdateVector(AdamStep(1e-3, step), 500)
            counters = run_update(device, vector, random_state(np.random.default_rng(step), 500))[1]
            assert counters["params_done"] == 500 and not kernel.kernel.interrupt
    assert line.waits == [True, True] and line.closed
