import pytest

from nearflash.gateware.nand.sealed import SealedChecker
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS


def streams(page) -> dict[str, list]:
    page_tags = [{"page": page.tag_fields, "number": number} for number in range(len(page.sealed))]
    return {"i_page_tag": page_tags, "i": [int(word) for word in page.sealed.view("<u8").ravel()]}


@pytest.mark.parametrize("stalls", STALLS)
def test_passes_on_what_is_its_own(make_page, with_pulses, stalls):
    page, other = make_page(4, 1), make_page(4, 2)
    page.sealed[1] = other.sealed[1]
    page.sealed[2] = page.sealed[3]  # another number
    content = page.sealed[:, :520].copy().view("<u8").ravel()
    lun = with_pulses(SealedChecker(), ("misdirected",))
    found = run_streams(lun, streams(page), {"o": 4 * 65, "pulses": 2}, stalls=stalls)["o"]
    assert [beat.data for beat in found] == content.tolist()
    assert [beat.misdirected for beat in found] == [0] * 65 + [1] * 130 + [0] * 65
    assert not any(beat.uncorrectable for beat in found)


def test_latency(make_page):
    cycles = transfer_cycles(SealedChecker(), streams(make_page(1, 3)), {"o": 65})
    assert cycles["o"][0] - cycles["i"][-1] == SealedChecker.LATENCY
