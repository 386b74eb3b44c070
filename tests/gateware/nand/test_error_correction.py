import pytest

from nearflash.gateware.nand.error_correction import ErrorCorrection
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS, SimulationTimeout


def position(bit: int, last: int) -> dict[str, int]:
    return {"position": bit, "last": last, "uncorrectable": 0}


@pytest.mark.parametrize("stalls", STALLS)
def test_flips_what_the_corrector_says(make_page, stalls):
    """Codewords 1 to 4 are dirty: one bit, a beat's first and last bits, parity only, uncorrectable."""
    page = make_page(6, 1)
    wrong = {1: [4191], 2: [0, 63, 64, 4191, 4192, 4399], 3: [4192, 4300], 4: [5, 6]}
    for codeword, bits in wrong.items():
        page.flip(codeword, bits)
    answers = [position(bit, bit == wrong[codeword][-1]) for codeword in (1, 2, 3) for bit in wrong[codeword]]
    answers.append({"position": 0, "last": 1, "uncorrectable": 1})
    inputs = {"i": page.beats(), "i_page_tag": [page.tag_fields], "i_errors": answers}
    found = run_streams(ErrorCorrection(), inputs, {"o": 6 * 68, "o_syndromes": 16}, stalls=stalls)["o"]
    assert [(b.corrected, b.uncorrectable) for b in found[::68]] == [(0, 0), (1, 0), (1, 0), (1, 0), (0, 1), (0, 0)]
    for number in (0, 1, 2, 3, 5):
        words = [beat.data for beat in found[68 * number : 68 * number + 68]]
        block = page.page_tag.block(page.index, page.kind, number)
        assert words[0] == int.from_bytes(block[:8], "little") and words[1] == int.from_bytes(block[8:], "little")
        assert words[2:67] == page.content[number].tolist()
        assert words[67] & 0xFFFF_FFFF == int.from_bytes(page.sealed[number, 520:524].tobytes(), "little")


def test_full_rate_and_latency(make_page):
    page = make_page(10, 2)
    cycles = transfer_cycles(ErrorCorrection(), {"i": page.beats(), "i_page_tag": [page.tag_fields]}, {"o": 680})
    assert cycles["i"][-1] - cycles["i"][0] == 689
    assert cycles["o"][0] - cycles["i"][68] == ErrorCorrection.LATENCY


def test_seven_codewords_wait_behind_a_dirty_one(make_page):
    page = make_page(9, 3)
    page.flip(0, [77])
    inputs = {"i": page.beats(), "i_page_tag": [page.tag_fields]}
    with pytest.raises(SimulationTimeout, match=f"i waits for ready: {7 * 69 + 1} of {9 * 69} sent"):
        run_streams(ErrorCorrection(), inputs, {"o_syndromes": 4, "o": 1}, timeout_cycles=700)
