"""A Verilated kernel as a board has it."""

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.abi.registers import MAGIC, UPDATE

board = pytest.importorskip("nearflash.sim.boards.kernel")


@pytest.fixture
def kernel():
    made = board.BoardKernel(CONFIGS["update-tiny"], 1 << 20)
    yield made
    made.close()


def test_registers_and_memory(kernel):
    assert kernel.read(UPDATE["magic"].offset) == MAGIC
    kernel.write(UPDATE["params"].offset, 77)
    assert kernel.read(UPDATE["params"].offset) == 77
    kernel.view(kernel.memory.base, 8)[:] = 3
    assert kernel.kernel.memory[:9].tolist() == [3] * 8 + [0]


def test_time_goes_on_before_a_poll_of_the_control_word_only(kernel):
    start = kernel.kernel.cycles
    kernel.read(UPDATE["magic"].offset)
    between = kernel.kernel.cycles
    kernel.read(UPDATE["control"].offset)
    assert between - start < 100 and kernel.kernel.cycles - between >= board.POLL_CYCLES


def test_nobody_answers_for_what_is_unplugged(kernel):
    kernel.write(UPDATE["params"].offset, 5)
    kernel.unplugged = True
    kernel.write(UPDATE["params"].offset, 6)
    assert kernel.read(UPDATE["magic"].offset) == kernel.read(UPDATE["params"].offset) == 0xFFFF_FFFF
    kernel.unplugged = False
    assert kernel.read(UPDATE["params"].offset) == 5
