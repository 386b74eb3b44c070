"""What is staged and published: the tensors' bits, torch's version counts, and what counts as a change afterwards."""

import numpy as np
import pytest
import torch

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.storage import ADAM_ARRAYS
from nearflash.training.step.norm import clip_scalar
from nearflash.training.step.parameters import FlatParameters

KINDS = ("plain", "odd", "one", "transposed", "strided", "empty", "long", "fp32")


def bf16(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def tensors():
    return [
        bf16(64, 32), bf16(7, 9), bf16(1), bf16(40, 50).t(), bf16(3000)[::2], bf16(0), bf16(9000), torch.zeros(777)
    ]  # fmt: skip


@pytest.fixture
def flat():
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors()]
    groups = [{"params": parameters, "param_names": KINDS}]
    return FlatParameters(groups, CopyFormat.BF16, 1024, ADAM_ARRAYS, staged=True)


def stage(flat, seed):
    """All extents, as a device gives them; the tensors' values then."""
    flat.prepare(range(len(flat.tensors)))
    extents = flat.manifest.extents
    masters = np.random.default_rng(seed).standard_normal(extents[-1].stop).astype(np.float32)
    low = torch.from_numpy(masters).bfloat16()
    for extent in extents:
        for tensor in flat.tensors_in(extent.start, extent.stop):
            entry = flat.entries[tensor]
            start, stop = max(entry.start, extent.start), min(entry.stop, extent.stop)
            wide = flat.copy_format(tensor) is CopyFormat.NONE
            source = torch.from_numpy(masters) if wide else low.view(torch.int16)
            flat.stage(start, stop, source[start:stop].numpy().view(np.uint8), flat.copy_format(tensor))
    wanted = zip(flat.entries, flat.tensors, strict=True)
    return [
        (torch.from_numpy(masters) if t.dtype is torch.float32 else low)[e.start : e.start + e.params].view(t.shape)
        for e, t in wanted
    ]


@pytest.mark.parametrize("cores", [1, 2, 7, 64])
def test_published_values_are_those_staged_and_no_change(flat, monkeypatch, cores):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    before = [tensor._version for tensor in flat.tensors]
    expected = stage(flat, 1)
    assert flat.find_changed() == [], "staging touches no tensor"
    flat.publish(range(len(flat.tensors)))
    assert all(torch.equal(tensor, new) for tensor, new in zip(flat.tensors, expected, strict=True))
    assert all(tensor._version > version for tensor, version in zip(flat.tensors, before, strict=True))
    assert flat.find_changed() == [] and not flat.versions_changed()


def test_masters_as_they_are_stored_are_rounded(flat):
    """As at a resume: fp32 for all, whatever the tensor's dtype."""
    flat.prepare(range(len(flat.tensors)))
    extents = flat.manifest.extents
    masters = np.random.default_rng(3).standard_normal(extents[-1].stop).astype(np.float32)
    for extent in extents:
        flat.stage(extent.start, extent.stop, masters[extent.start : extent.stop].view(np.uint8), CopyFormat.NONE)
    flat.publish(range(len(flat.tensors)))
    assert flat.find_changed() == []
    assert all(flat.agrees(extent.start, extent.stop, masters[extent.start : extent.stop]) for extent in extents)


def test_a_step_that_was_discarded_leaves_nothing(flat):
    """What it staged is staged again; only some tensors are then published."""
    stage(flat, 1)
    expected = stage(flat, 2)
    published = [0, 1, 6]
    flat.publish(published)
    for index, (tensor, new) in enumerate(zip(flat.tensors, expected, strict=True)):
        assert torch.equal(tensor, new if index in published else torch.zeros_like(tensor))
    assert flat.find_changed() == []


def test_values_come_in_place_where_nothing_reads_the_tensors():
    """No host copy but of tensors that are not contiguous; what is not published is to be taken back."""
    parameters = [torch.nn.Parameter(tensor) for tensor in tensors()]
    flat = FlatParameters([{"params": parameters, "param_names": KINDS}], CopyFormat.BF16, 1024, ADAM_ARRAYS)
    expected = stage(flat, 1)
    copied = [index for index, held in enumerate(flat._next) if held is not None]
    assert copied == [KINDS.index("transposed"), KINDS.index("strided"), KINDS.index("empty")]
    assert flat.begun == {piece.position // 1024 for e in flat.manifest.extents
                          for piece in flat.pieces(e.start, e.stop) if piece.tensor not in copied}  # fmt: skip
    before = [tensor._version for tensor in flat.tensors]
    flat.publish(range(len(flat.tensors)))
    assert all(torch.equal(tensor, new) for tensor, new in zip(flat.tensors, expected, strict=True))
    assert all(tensor._version > version for tensor, version in zip(flat.tensors, before, strict=True))
    assert not flat.begun and flat.find_changed() == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty"])
def test_one_bit_behind_the_count_of_versions(flat, kind):
    stage(flat, 1)
    flat.publish(range(len(flat.tensors)))
    tensor = flat.tensors[KINDS.index(kind)]
    words = tensor.data.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)
    last = tuple(length - 1 for length in words.shape)
    words[last] ^= 1
    assert not flat.versions_changed() and flat.find_changed(threads=1) == [kind] == flat.find_changed()
    words[last] ^= 1
    assert flat.find_changed() == []


def test_torch_tells_a_graph_that_published_values_come_too_late_for(flat):
    weight = flat.tensors[0]
    loss = (weight.float() * weight.float()).sum() + weight.square().sum()
    stage(flat, 1)
    flat.publish([0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_was_replaced_is_copied_to_by_torch(flat):
    """Another dtype, in the tensor's place by `.data`: its own memory must not be taken for what it was."""
    expected = stage(flat, 1)[0]
    flat.tensors[0].data = torch.zeros(64, 32, dtype=torch.float64)
    flat.publish([0])
    assert flat.tensors[0].dtype is torch.float64 and torch.equal(flat.tensors[0], expected.double())


@pytest.mark.parametrize("scalar", [1.0, clip_scalar(7.3, 1.1, 3.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_any_layout_are_gathered_exactly(flat, scalar, dtype):
    generator = torch.Generator().manual_seed(5)
    for index, tensor in enumerate(flat.tensors):
        kind = dtype if tensor.dtype is torch.bfloat16 else torch.float32
        tensor.grad_dtype = kind
        values = torch.randn(tensor.numel(), generator=generator).to(kind)
        tensor.grad = (values if index % 2 else torch._neg_view(values)).reshape(tensor.shape)
    out = np.full(flat.manifest.extents[-1].stop, np.nan, np.float32)
    for extent in flat.manifest.extents:
        flat.put_gradients(extent.start, extent.stop, scalar, out[extent.start : extent.stop])
    for tensor, entry in zip(flat.tensors, flat.entries, strict=True):
        exact = (tensor.grad.reshape(-1).double().numpy() * scalar).astype(np.float32)
        assert np.array_equal(out[entry.start : entry.start + entry.params], exact)
        out[entry.start : entry.start + entry.params] = 0
    assert not out.any(), "padding is zero"
