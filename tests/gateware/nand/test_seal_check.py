import pytest

from nearflash.gateware.nand.seal_check import SealCheck
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS


def inputs(page, first=0):
    words = [int(word) for word in page.sealed.view("<u8").ravel()]
    return {"i": words, "i_page_tag": [{"page": page.tag_fields, "number": first + n} for n in range(len(page.sealed))]}


@pytest.mark.parametrize("stalls", STALLS)
def test_beats_pass_and_wrong_crcs_are_told(make_page, with_pulses, stalls):
    page = make_page(5, 2)
    page.sealed[1, 5] ^= 1
    page.sealed[2, 521] ^= 1
    page.sealed[4, 527] ^= 1  # behind the CRC: not covered
    given = inputs(page)
    found = run_streams(with_pulses(SealCheck(), ("wrong",)), given, {"o": len(given["i"]), "pulses": 2}, stalls=stalls)
    assert [beat.data for beat in found["o"]] == given["i"]
    assert [beat.last for beat in found["o"]] == ([0] * 65 + [1]) * 5


def test_another_number_is_wrong(make_page, with_pulses):
    given = inputs(make_page(3, 3), first=1)
    run_streams(with_pulses(SealCheck(), ("wrong",)), given, {"o": len(given["i"]), "pulses": 3})


def test_68_cycles_a_codeword(make_page):
    given = inputs(make_page(3, 1))
    cycles = transfer_cycles(SealCheck(), given, {"o": len(given["i"])})["o"]
    assert cycles[66] - cycles[0] == 68
