"""The self test of the attend kernel, on a device that answers as the model does or nearly so."""

import numpy as np
import pytest

from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.commands import Completion
from nearflash.abi.kernel.config import CONFIGS
from nearflash.device.base import Identity
from nearflash.device.checked import CheckedDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.device.selftest import attend
from nearflash.device.selftest.attend import compare_heads
from nearflash.model.attention.random_vectors import MODES


class Answering(CheckedDevice):
    """Ends each head as the model does; `spoil` may change the output (uint16 view) and the completion of each."""

    def __init__(self, vectors, spoil):
        config = CONFIGS["attend-tiny"]
        self.memory, self.vectors, self.spoil = SimulatedMemory(1 << 26), vectors, spoil
        super().__init__(Identity("answering", config, config.digest64, 1, 0), self.memory)

    @classmethod
    def open(cls, config):
        raise NotImplementedError

    def _start(self, command):
        completions = self.memory.view(*command.writes()["completions"])
        for index, head in enumerate(command.descriptors):
            vector = self.vectors[head.page_tag.sequence]
            result = vector.result(repeated=True)
            record = np.frombuffer(vector.completion(result).pack(), np.uint8).copy()
            out = result.out.view(np.uint16).copy()
            self.spoil(index, out, record)
            completions[32 * index : 32 * index + 32] = record
            self.memory.view(head.out_address, out.nbytes).view(np.uint16)[:] = out.reshape(-1)

    def _finish(self, timeout_s):
        return Completion({})

    def _abort(self):
        pass


@pytest.fixture
def compared(monkeypatch):
    """Rows of the self test of a device that spoils its answers by the function given."""
    vectors, draw = [], attend.random_mode_vector

    def remembered(*arguments):
        vectors.append(draw(*arguments))
        return vectors[-1]

    def compare(spoil):
        monkeypatch.setattr(attend, "random_mode_vector", remembered)
        with Answering(vectors, spoil) as device:
            rows = list(compare_heads(device, tokens=100, seed=1))
            assert device.memory.allocate(1, device.links).address == 4096, "all buffers must be free again"
        return rows

    return compare


def test_heads_of_every_mode_are_compared_to_the_last_word(compared):
    rows = compared(lambda index, out, record: None)
    assert {row.case.split()[0] for row in rows} == set(MODES)
    assert rows[0].words == 64 + 16 and rows[0].case.split()[1:] == ["S", "100", "d", "64", "g", "1"]
    assert not any(row.mismatches for row in rows)


def test_one_bit_of_an_output_or_a_completion_is_found(compared):
    def spoil(index, out, record):
        if index == 2:
            out[-1, -1] ^= 1
        if index == 5:
            record[12] ^= 1

    assert [index for index, row in enumerate(compared(spoil)) if row.mismatches == 1] == [2, 5]


def test_a_head_without_output_differs_everywhere(compared):
    def spoil(index, out, record):
        record[0] |= 2 * (index == 1)

    row = compared(spoil)[1]
    assert row.mismatches == 1 + 2 * 80 < row.words


def test_too_few_and_too_many_tokens(compared):
    with Answering([], None) as device:
        with pytest.raises(CommandError, match="tokens must be at least 1, not 0"):
            next(compare_heads(device, tokens=0, seed=1))
        with pytest.raises(CommandError, match="tokens must be fewer for the room of attend-tiny, not 5000"):
            next(compare_heads(device, tokens=5000, seed=1))
