import pytest

from nearflash.gateware.nand.bch.field import coordinates
from nearflash.gateware.nand.bch.share import CorrectorShare
from nearflash.sim.pysim.harness import run_streams


def beats(bit: int) -> list[int]:
    odd = [coordinates(i)[4415 - bit] for i in range(1, 32, 2)]
    return [sum(odd[4 * beat + k] << 13 * k for k in range(4)) for beat in range(4)]


def test_answers_go_where_they_belong():
    wrong = {0: [4300, 4301], 1: [], 2: [4302, 4390]}
    inputs = {f"i__{channel}": [b for bit in bits for b in beats(bit)] for channel, bits in wrong.items()}
    outputs = {f"o__{channel}": len(bits) for channel, bits in wrong.items()}
    found = run_streams(CorrectorShare(3), inputs, outputs, stalls="both")
    assert {channel: [item.position for item in found[f"o__{channel}"]] for channel in wrong} == wrong


def test_channels_message():
    with pytest.raises(ValueError, match="channels must be 1 to 8, not 9"):
        CorrectorShare(9)
