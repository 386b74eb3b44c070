import numpy as np
import pytest

from nearflash.gateware.weights.levels import LevelValues
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.verify.units.weights.levels import make_block, words_of


def a_block(rng, count, share, wide, bf16):
    return make_block(rng, count, share, 2 if wide else 1, bf16)


def inputs(blocks, width):
    items = {}
    for block in blocks:
        for name, words in words_of(block, width).items():
            items.setdefault(name, []).extend(words)
    return items


def check(found, blocks, width):
    """Whether words are those of the blocks; past a block's values they may be anything."""
    found = iter(found)
    for block in blocks:
        for first in range(0, block.values.size, width):
            few = block.values[first : first + width]
            assert next(found) & ((1 << 16 * few.size) - 1) == int.from_bytes(few.tobytes(), "little")


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("wide", [0, 1])
@pytest.mark.parametrize(("width", "bf16"), [(4, 0), (4, 1), (16, 1)])
def test_equals_model(width, bf16, wide, stalls):
    """Blocks of all lengths, whose codes end in the first level, in any, and all in escapes."""
    rng = np.random.default_rng(width)
    counts, shares = (1, width, width + 1, 3 * width - 1, 6 * width), (0, 0.3, 0.7, 1)
    blocks = [a_block(rng, count, share, wide, bf16) for count in counts for share in shares]
    beats = sum(-(-block.values.size // width) for block in blocks)
    found = run_streams(
        LevelValues(width), inputs(blocks, width), {"o": beats}, stalls=stalls, hold={"bf16": bf16, "wide": wide}
    )
    check(found["o"], blocks, width)


def test_a_word_a_cycle_whatever_the_codes_are():
    """Blocks of 60 words, by the share of each level's values that have codes of the next."""
    words, shares = 60, (0, 0.3, 0.8, 1)
    blocks = [a_block(np.random.default_rng(1), words * 8, share, 1, 0) for share in shares]
    given, count = inputs(blocks, 8), words * len(blocks)
    cycles = transfer_cycles(LevelValues(8), given, {"o": count}, hold={"wide": 1})["o"]
    for share, first in zip(shares, range(0, count, words), strict=True):
        own = cycles[first : first + words]
        assert own == list(range(own[0], own[0] + words)), share


def test_latency_from_first_codes_and_from_values():
    block = a_block(np.random.default_rng(2), 4, 0, 1, 0)
    for name, latency in (("i_first", LevelValues.LATENCY), ("i_value", LevelValues.VALUE_LATENCY)):
        assert measure_latency(LevelValues(4), inputs([block], 4), i=name, hold={"wide": 1}) == latency


def test_messages():
    with pytest.raises(ValueError, match="width must be a power of two from 4 to 64 elements, not 2"):
        LevelValues(2)
