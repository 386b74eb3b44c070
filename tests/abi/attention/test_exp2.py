from nearflash.abi.attention.exp2 import EXP2_CONSTANT_BITS, EXP2_SEGMENTS_LOG2, EXP2_SLOPE_BITS, exp2_table


def test_table_fits_its_widths():
    table = exp2_table()
    assert len(table) == 1 << EXP2_SEGMENTS_LOG2
    assert {constant.bit_length() for constant, _ in table} == {EXP2_CONSTANT_BITS}, "the top bit is always one"
    assert max(slope.bit_length() for _, slope in table) == EXP2_SLOPE_BITS
    assert len({constant % 1024 for constant, _ in table}) == 1, "low bits are not stored"


def test_a_known_segment():
    constant, slope = exp2_table()[32]
    half = 1 << 17
    assert abs((constant - half) / 2**18 - 1024 * 2**0.5) < 0.012, "half of a chord's distance"
    assert abs(slope / 2**18 - 1024 * 2**0.5 * (2 ** (1 / 64) - 1) / 1024) < 2**-18
