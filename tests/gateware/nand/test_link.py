from amaranth.hdl import Const
from amaranth.lib import data

from nearflash.gateware.nand.link import BEATS_BITS, RAW_BEATS, BusCycle, codeword_beats


def test_a_page_of_32_codewords_is_one_burst():
    assert RAW_BEATS == 69 and 32 * RAW_BEATS < 1 << BEATS_BITS


def test_beats_of_codewords_need_no_wider_result_than_the_count():
    assert len(codeword_beats(Const(0, 6))) >= BEATS_BITS


def test_the_model_reads_the_fields_where_they_lie():
    offsets = {name: field.offset for name, field in data.Layout.cast(BusCycle)}
    assert offsets == {"lun": 0, "kind": 8, "byte": 10, "beats": 18}  # nand/channel.py: _PINS
