import numpy as np
import torch

from nearflash.device.backends.host.bf16 import bf16_patterns, bf16_values


def test_values_are_rounded_as_torch_rounds_them():
    """Ties, subnormals, the largest, infinities; NaN is left out."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    words = np.concatenate([upper + lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).astype(np.uint32)
    values = words.view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(bf16_patterns(values), expected)


def test_every_pattern_is_its_value():
    patterns = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(patterns).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bf16_values(patterns).view(np.uint32), expected.view(np.uint32))
