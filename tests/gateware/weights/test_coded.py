import numpy as np
import pytest

from nearflash.abi.bitmap import SECTIONS, RowFormat, Section
from nearflash.abi.formats import BF16, FP16
from nearflash.gateware.weights.coded import CodedValues
from nearflash.model.weights.coded import codebook, encode
from nearflash.model.weights.fields import join_fields
from nearflash.sim.pysim.harness import measure_latency, run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

STREAMS = {Section.LOW: "i_low", Section.ESCAPES: "i_escape", Section.VALUES: "i_value"}
BITS = SECTIONS[RowFormat.CODED_FP16]
BOOK = bytes([9, 12, 3])


def words(fields, bits, width):
    """Words of `width` fields of so many bits, the last one filled up with zeros."""
    padded = np.pad(fields, (0, -fields.size % width))
    return [int.from_bytes(join_fields(word, bits), "little") for word in padded.reshape(-1, width)]


def a_row(rng, count, escapes, number):
    """Values of which about such a share has another exponent than the codebook's."""
    exponents = rng.choice(list(BOOK), count)
    exponents = np.where(rng.random(count) < escapes, rng.integers(0, 1 << number.exponent_bits, count), exponents)
    mantissa_and_sign = rng.integers(0, 1 << 16, count) & ~(((1 << number.exponent_bits) - 1) << number.mantissa_bits)
    return (mantissa_and_sign | exponents << number.mantissa_bits).astype(np.uint16)


def inputs(rows, width, number):
    """Items of all streams for rows of values, each with its codebook."""
    items = {name: [] for name in ("i_codebook", "i_low", "i_code", "i_escape", "i_value")}
    for values, book in rows:
        planes = {section: words(f, BITS[section], width) for section, f in encode(values, book, number).items()}
        beats = planes.pop(Section.CODES)
        items["i_code"] += [{"codes": beat, "last": index == len(beats) - 1} for index, beat in enumerate(beats)]
        items["i_codebook"] += [int.from_bytes(book, "little")]
        for section, words_of in planes.items():
            items[STREAMS[section]] += words_of
    return items


def equal(found, rows, width):
    """Whether words are those of the rows; past a row's values they may be anything."""
    found = iter(found)
    for values, _ in rows:
        for first in range(0, len(values), width):
            few = values[first : first + width]
            assert next(found) & ((1 << 16 * few.size) - 1) == int.from_bytes(few.tobytes(), "little")


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("number", [FP16, BF16])
@pytest.mark.parametrize("width", [4, 8, 32])
def test_equals_model(width, number, stalls):
    """Rows of all lengths, with no, some and only escapes, each with a codebook of its own or the same."""
    rng = np.random.default_rng(width)
    counts, shares = (1, width, width + 1, 3 * width - 1, 6 * width), (0, 0.1, 0.7, 1)
    values = [a_row(rng, count, share, number) for count in counts for share in shares]
    rows = [(each, codebook(each, number) if index % 3 else BOOK) for index, each in enumerate(values)]
    beats = sum(-(-each.size // width) for each in values)
    given = inputs(rows, width, number)
    found = run_streams(CodedValues(width), given, {"o": beats}, stalls=stalls, hold={"bf16": number is BF16})
    equal(found["o"], rows, width)


@pytest.mark.parametrize("share", [0, 0.02, 0.5, 1])
def test_one_word_a_cycle_with_any_number_of_escapes(share):
    row = a_row(np.random.default_rng(1), 40 * 8, share, FP16)
    cycles = transfer_cycles(CodedValues(8), inputs([(row, BOOK)], 8, FP16), {"o": 40})["o"]
    assert cycles == list(range(cycles[0], cycles[0] + 40))


def test_latency_from_each_input():
    """A word without escapes waits for its codes; one of escapes for these; the other planes may come at the end."""
    plain, escaped = (
        inputs([(np.array(values, np.uint16), BOOK)], 4, FP16) for values in ([9 << 10] * 4, [1 << 10] * 4)
    )
    assert measure_latency(CodedValues(4), plain, i="i_code") == CodedValues.LATENCY
    assert measure_latency(CodedValues(4), escaped, i="i_escape") == CodedValues.ESCAPE_LATENCY
    assert measure_latency(CodedValues(4), plain, i="i_value") == CodedValues.VALUE_LATENCY


def test_messages():
    with pytest.raises(ValueError, match="width must be a power of two from 4 to 64 elements, not 2"):
        CodedValues(2)
