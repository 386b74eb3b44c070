"""Fingerprints against their formula in Python integers, and what they must tell apart."""

import pytest
import torch

from nearflash.training.step.fingerprint import BLOCK, KEYS, RUN, GradientFingerprints, fingerprint, fingerprints
from nearflash.training.step.norm import squares_and_fingerprints

DTYPES = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def by_formula(tensor):
    text = b"".join(
        (word % (1 << 8 * tensor.element_size())).to_bytes(tensor.element_size(), "little")
        for word in tensor.reshape(-1).view(DTYPES[tensor.dtype]).tolist()
    )
    words = [int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text), 4)]
    keys = KEYS.tolist()
    return sum(word * keys[i % RUN] * (2 * (i // RUN) + 1) for i, word in enumerate(words)) % (1 << 64)


def values(length, dtype=torch.float32, seed=1):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 1, RUN - 1, RUN, 3 * RUN + 5])
def test_equal_to_the_formula(dtype, length):
    tensor = values(length, dtype)
    assert fingerprint(tensor) == by_formula(tensor) == fingerprints([tensor])[0]


@pytest.mark.parametrize("length", [6, 7])
def test_numbers_of_16_bits_anywhere_in_memory(length):
    tensor = values(20, torch.bfloat16)
    for first in (0, 1, 2, 3):
        part = tensor[first : first + length]
        assert fingerprint(part) == by_formula(part) == fingerprint(part.clone())


def test_parts_add_up_in_any_order():
    tensor = values(BLOCK + 3 * RUN + 7)
    gathered = GradientFingerprints()
    for first, stop in ((5000, len(tensor)), (0, 33), (33, 5000)):
        gathered.add(4, first, tensor[first:stop])
    assert gathered.agree({4: fingerprints([tensor])[0], 5: 0})
    assert not gathered.agree({4: 0})


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_norm_takes_those_of_the_gradients_in_fp32(dtype):
    gradients = [values(length, dtype, seed=length) for length in (BLOCK + 1500, 0, 77)]
    assert squares_and_fingerprints(gradients)[1] == fingerprints([gradient.float() for gradient in gradients])


def test_strides_do_not_matter():
    tensor = values(70 * 30).reshape(70, 30)
    assert fingerprint(tensor.t()) == fingerprint(tensor.t().contiguous()) != fingerprint(tensor)


@pytest.mark.parametrize("place", [0, 1, RUN, 2 * RUN + 1])
def test_a_bit_an_exchange_a_sign_of_zero(place):
    tensor = torch.zeros(3 * RUN)
    tensor[5] = 1.0
    before = fingerprint(tensor)
    for changed in (tensor.clone(), tensor.roll(1), tensor.roll(RUN)):
        changed.view(torch.int32)[place] ^= 1 << 31
        assert fingerprint(changed) != before
