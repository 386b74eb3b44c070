import numpy as np
import pytest

from nearflash.gateware.nand.crc_checker import CrcChecker
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

CORRECTED, UNCORRECTABLE = 1, 2


def beats(page, flags: list[int]) -> list[dict[str, int]]:
    blocks = b"".join(page.page_tag.block(page.index, page.kind, number) for number in range(len(page.sealed)))
    rows = np.hstack([np.frombuffer(blocks, np.uint8).reshape(-1, 16), page.sealed]).view("<u8")
    return [
        {"data": int(word), "corrected": flag & 1, "uncorrectable": flag >> 1}
        for flag, row in zip(flags, rows, strict=True) for word in row
    ]  # fmt: skip


@pytest.mark.parametrize("stalls", STALLS)
def test_flags(make_page, with_pulses, stalls):
    page = make_page(6, 1)
    flags = [0, CORRECTED, UNCORRECTABLE, 0, CORRECTED, UNCORRECTABLE]
    for codeword, byte in ((3, 519), (4, 523), (5, 0)):
        page.sealed[codeword, byte] ^= 0x10  # data, CRC, aux
    content = page.sealed[:, :520].copy().view("<u8").ravel()
    lun = with_pulses(CrcChecker(), ("corrected", "uncorrectable", "misdirected"))
    found = run_streams(lun, {"i": beats(page, flags)}, {"o": 6 * 65, "pulses": 5}, stalls=stalls)
    assert [beat.data for beat in found["o"]] == content.tolist()
    expected = [(0, 0), (0, 0), (1, 0), (0, 1), (1, 0), (1, 0)]
    assert [(b.uncorrectable, b.misdirected) for b in found["o"]] == [flag for flag in expected for _ in range(65)]
    assert [(b.first, b.last) for b in found["o"]] == [(k == 0, k == 64) for k in range(65)] * 6
    assert found["pulses"] == [1, 2, 4, 2, 2]


def test_full_rate_and_latency(make_page):
    cycles = transfer_cycles(CrcChecker(), {"i": beats(make_page(10, 1), [0] * 10)}, {"o": 650})
    assert cycles["i"][-1] - cycles["i"][0] == 679
    assert cycles["o"][0] - cycles["i"][67] == CrcChecker.LATENCY
