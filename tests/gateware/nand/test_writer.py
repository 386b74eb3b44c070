import pytest

from nearflash.gateware.nand.writer import CodewordWriter
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS


def targets(page) -> list[dict]:
    count = len(page.sealed)
    return [
        {"number": number, "place": number, "lun": page.lun, "row": page.row, "final": number == count - 1}
        for number in range(count)
    ]


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_model(make_page, stalls):
    page = make_page(3, 1)
    words = [int(word) for word in page.sealed.view("<u8").ravel()]
    found = run_streams(CodewordWriter(), {"i": words, "i_target": targets(page)}, {"o": 3 * 69}, stalls=stalls)["o"]
    for expected, beat in zip(page.beats(), found, strict=True):
        assert {name: getattr(beat, name) for name in expected} == expected


def test_138_cycles_a_codeword(make_page):
    page = make_page(3, 1)
    words = [int(word) for word in page.sealed.view("<u8").ravel()]
    cycles = transfer_cycles(CodewordWriter(), {"i": words, "i_target": targets(page)}, {"o": 3 * 69})["o"]
    assert cycles[69] - cycles[0] == 138
