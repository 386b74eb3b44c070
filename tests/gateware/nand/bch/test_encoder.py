import numpy as np
import pytest

from nearflash.gateware.nand.bch.encoder import Encoder
from nearflash.model.nand.bch.encoder import parity
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

SEALED = np.zeros((3, 528), np.uint8)
SEALED[:, :524] = np.random.default_rng(1).integers(0, 256, (3, 524), np.uint8)
BEATS = [int(word) for word in SEALED.view("<u8").ravel()]


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_model(stalls):
    found = run_streams(Encoder(), {"i": BEATS}, {"o": 3 * 69}, stalls=stalls)["o"]
    expected = np.hstack([SEALED[:, :524], parity(SEALED[:, :524]), np.zeros((3, 2), np.uint8)])
    np.testing.assert_array_equal([beat.data for beat in found], expected.view("<u8").ravel())
    assert [(beat.first, beat.last) for beat in found] == [(k == 0, k == 68) for k in range(69)] * 3


def test_138_cycles_a_codeword():
    cycles = transfer_cycles(Encoder(), {"i": BEATS}, {"o": 3 * 69})["o"]
    assert cycles[69] - cycles[0] == 138
