"""Loops over tensors by address: what they copy and sum, and which tensors they may be given."""

import numpy as np
import pytest
import torch

from nearflash.training.step.fingerprint import fingerprint, fingerprint_of_copy, fingerprints
from nearflash.training.step.host_memory import KEYS, RUN, copy_all, is_plain, sums_of, widen_bf16

PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def values(length, dtype=torch.float32, seed=1):
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("first", [0, 1, RUN - 1, 5 * RUN + 3])
@pytest.mark.parametrize("length", [0, 1, RUN, 2 * RUN + 9])
def test_words_are_summed_where_they_lie_and_where_they_are_copied_to(first, length):
    words = np.random.default_rng(length).integers(0, 1 << 32, length + 1, dtype=np.uint32)
    out = np.zeros(length + 1, np.uint32)
    places = [(word, first + i) for i, word in enumerate(words[:length].tolist())]
    expected = sum(w * int(KEYS[i % RUN]) * (2 * (i // RUN) + 1) for w, i in places) % (1 << 64)
    source, target = words.ctypes.data, out.ctypes.data
    assert sums_of([(source, 0, length, first), (source, target, length, first)]) == [expected] * 2
    assert np.array_equal(out[:length], words[:length]) and out[length] == 0, "one word behind the last stays"
    assert sums_of([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0, 1, 33, 2 * RUN + 6])
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("given", [None, torch.float32])
def test_a_copy_has_the_fingerprint_of_what_was_copied(dtype, length, offset, given):
    whole, target = values(length + 4, given or dtype), torch.full((length + 4,), 7.0, dtype=dtype)
    source, part = whole[offset : offset + length], target[2 : 2 + length]
    assert fingerprint_of_copy(source, part, first=64) == fingerprint(part.clone(), first=64)
    assert torch.equal(part, source.to(dtype))
    assert (target[:2] == 7).all() and (target[2 + length :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_fingerprints_of_any_layout(dtype, threads):
    """Every second element of a vector was one whose address and length alone do not tell."""
    base = values(6000, dtype)
    tensors = [base, base[::2], base[1::2], base[1:8], base[:0], base.reshape(60, 100).t(), torch._neg_view(base)]
    expected = [fingerprint(tensor.reshape(-1).clone(memory_format=torch.contiguous_format)) for tensor in tensors]
    expected[-1] = fingerprint(-base)
    assert fingerprints(tensors, threads) == expected == [fingerprint(tensor) for tensor in tensors]
    assert len(set(expected)) == len(tensors)


def test_which_tensors_are_plain():
    base = torch.ones(4, 6)
    assert all(map(is_plain, (base, base[1:], base.bfloat16(), torch.nn.Parameter(base), base.detach())))
    others = {
        "strided": base.t(),
        "expanded": torch.ones(1).expand(3),
        "negative": torch._neg_view(base),
        "sparse": base.to_sparse(),
        "elsewhere": base.to("meta"),
        "zeros without memory": torch._efficientzerotensor((3,)),
        "another class": base.as_subclass(type("Odd", (torch.Tensor,), {})),
    }
    assert [name for name, tensor in others.items() if is_plain(tensor)] == []


def test_every_bf16_number_as_fp32():
    out = np.empty(PATTERNS.size, np.float32)
    widen_bf16(PATTERNS.ctypes.data, out)
    assert np.array_equal(out.view(np.uint32), PATTERNS.astype(np.uint32) << 16)


def test_rows_are_copied():
    source, target = PATTERNS[:100].copy(), np.zeros(100, np.uint16)
    at, to = source.ctypes.data, target.ctypes.data
    copy_all([(to + 20, at, 6), (to + 198, at + 198, 2)])
    assert target[10:13].tolist() == [0, 1, 2] and target[99] == 99 and np.count_nonzero(target) == 3
