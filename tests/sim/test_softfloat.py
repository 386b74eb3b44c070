import numpy as np

from nearflash.sim.softfloat import softfloat


def fp32(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def test_results_and_exceptions():
    bits, flags = softfloat("div", fp32(1, 1, 0, 6), fp32(3, 0, 0, 2))
    assert bits.tolist() == [0x3EAAAAAB, 0x7F800000, 0x7FC00000, 0x40400000]
    assert flags.tolist() == [1, 8, 16, 0]


def test_three_operands_and_narrow_results():
    assert softfloat("fma", fp32(2), fp32(3), fp32(-6))[0].tolist() == [0]
    bits, flags = softfloat("to_fp16", fp32(1, 65520, np.nan))
    assert (bits.dtype, bits.tolist(), flags.tolist()) == (np.uint16, [0x3C00, 0x7C00, 0x7E00], [0, 5, 0])
