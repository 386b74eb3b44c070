"""Updates begun during backward: whatever is predicted, the bits are those of overlap="step"."""

import threading
import time

import pytest
import torch

from nearflash.abi.errors import NonFiniteError, StateError
from nearflash.training import LossScale
from nearflash.training.step.parameters import FlatParameters
from nearflash.training.step.speculation import LONGEST_PAUSE

SIZES = (3000, 10, 2048, 1500, 1, 900)


def make():
    generator = torch.Generator().manual_seed(4)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]


def backward(optimizer, tensors, step, without=(), size=1.0):
    generator = torch.Generator().manual_seed(50 + step)
    factors = [torch.randn(n, generator=generator) * size for n in SIZES]
    chosen = [i for i in range(len(SIZES)) if i not in without]
    optimizer.scale_loss(sum((tensors[i] * factors[i]).sum() for i in chosen)).backward()
    if not optimizer._optimizer_state.closed:
        optimizer._worker(lambda: None)  # after what the hooks have left to do


def settle(optimizer, seconds=30.0):
    """Let what backward has begun come to its end."""
    deadline = time.monotonic() + seconds
    while (
        optimizer.report.traffic.flash_written_bytes < 12 * optimizer.store.manifest.params
        and time.monotonic() < deadline
    ):
        time.sleep(0.001)


# What a training script may do between backward and step: (steps that do it, what they do, mispredictions).


def change_gradient(optimizer, tensors, step):
    tensors[2].grad.mul_(0.5)


def replace_gradient(optimizer, tensors, step):
    tensors[0].grad = tensors[0].grad * 0.25


def remove_gradient(optimizer, tensors, step):
    tensors[3].grad = None


def change_lr(optimizer, tensors, step):
    optimizer.param_groups[0]["lr"] *= 0.5


def accumulate_unseen(optimizer, tensors, step):
    backward(optimizer, tensors, 20 + step)


def grow(optimizer, tensors, step):
    """The norm is over the limit."""
    for tensor in tensors:
        tensor.grad.mul_(1e3)


def nothing(optimizer, tensors, step):
    """Nothing."""


@pytest.mark.parametrize(
    "action", [nothing, change_gradient, replace_gradient, remove_gradient, change_lr, accumulate_unseen, grow]
)
def test_equal_to_the_bit_whatever_happens(open_optimizer, tmp_path, action):
    results = {}
    for overlap in ("step", "backward"):
        tensors = make()
        optimizer = open_optimizer(
            tensors, lr=0.1, path=tmp_path / overlap, overlap=overlap, max_grad_norm=100.0 * len(SIZES)
        )
        for step in range(6):
            optimizer.zero_grad()
            backward(optimizer, tensors, step)
            if step in (1, 4):
                action(optimizer, tensors, step)
            optimizer.step()
        results[overlap] = [t.detach() for t in tensors] + [
            torch.from_numpy(optimizer.store.read_array(a)) for a in "pmv"
        ]
        assert optimizer.report.mispredictions == (0 if overlap == "step" or action is nothing else 2)
    assert all(torch.equal(one, other) for one, other in zip(*results.values(), strict=True))


def by_data(gradient):
    gradient.data.mul_(0.5)


def by_numpy(gradient):
    gradient.numpy()[:] *= 0.5


def by_exchange(gradient):
    """As a collective writes: two elements change places, so that sum and norm stay."""
    gradient.data[:2] = gradient.data[:2].flip(0).clone()


def by_sign(gradient):
    gradient.data[-1].neg_()


@pytest.mark.parametrize("change", [by_data, by_numpy, by_exchange, by_sign])
def test_gradients_that_change_without_a_version(open_optimizer, tmp_path, change):
    """dist.all_reduce(p.grad) of torch's own tutorial does; they were gathered before, and kept."""
    results = {}
    for overlap in ("step", "backward"):
        tensors = make()
        optimizer = open_optimizer(tensors, lr=0.1, path=tmp_path / overlap, overlap=overlap)
        backward(optimizer, tensors, 0)
        if overlap == "backward":
            settle(optimizer)
        version = tensors[2].grad._version
        change(tensors[2].grad)
        assert tensors[2].grad._version == version
        optimizer.step()
        results[overlap] = [t.detach() for t in tensors]
        assert optimizer.report.mispredictions == (overlap == "backward") and optimizer.steps == 1
    assert all(torch.equal(one, other) for one, other in zip(*results.values(), strict=True))


def test_a_gradient_that_was_not_finite_for_a_while(open_optimizer):
    """What counts are the gradients at `step`."""
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward")
    tensors[1].register_hook(lambda gradient: gradient * float("nan"))
    backward(optimizer, tensors, 0)
    time.sleep(0.05)
    tensors[1].grad.data.fill_(1.0)
    optimizer.step()
    assert optimizer.steps == 1 and optimizer.report.mispredictions == 1


def test_updates_run_before_the_step(open_optimizer):
    """All extents are written when backward has ended, and still the tensors and the store are those before."""
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward")
    before = [t.detach().clone() for t in tensors]
    backward(optimizer, tensors, 0)
    settle(optimizer)
    assert optimizer.report.traffic.flash_written_bytes == 12 * optimizer.store.manifest.params
    assert optimizer.steps == 0 and all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    optimizer.step()
    assert optimizer.steps == 1 and not any(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert optimizer.report.traffic.flash_written_bytes == 12 * optimizer.store.manifest.params, "once"
    assert all(t.grad is not None for t in tensors), "gradients stay"


def test_gradients_that_are_taken_away_while_others_look_at_them(open_optimizer, monkeypatch):
    """Only the thread of backward reads `p.grad`: torch crashes where one thread reads it and another sets it to None.

    So what the hook was given counts, before the worker has looked at it, and before it is gathered.
    """
    tensor, gates, gathered = torch.nn.Parameter(torch.ones(1024)), [threading.Event() for _ in range(3)], []
    optimizer, put = open_optimizer([tensor], overlap="backward"), FlatParameters.put_gradients

    def put_late(flat, start, stop, scalar, out, *given):
        gates[1].set()
        gates[2].wait(30)
        put(flat, start, stop, scalar, out, *given)
        gathered.append(float(out[0]))

    monkeypatch.setattr(FlatParameters, "put_gradients", put_late)
    optimizer._worker.later(gates[0].wait)
    (3 * tensor).sum().backward()
    tensor.grad = torch.full((1024,), 5.0)
    gates[0].set()
    assert gates[1].wait(30)
    tensor.grad.data = torch.full((1024,), 7.0)
    gates[2].set()
    optimizer.step()
    assert gathered == [3.0, 7.0] and optimizer.report.mispredictions == optimizer.steps == 1


def test_discarded_updates_are_not_counted_as_parameters(open_optimizer):
    """The bytes of a misprediction were moved, but what they are a fraction of is what was committed."""
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward")
    backward(optimizer, tensors, 0)
    settle(optimizer)
    change_gradient(optimizer, tensors, 0)
    optimizer.step()
    params = sum(tensor.stop - tensor.start for tensor in optimizer.store.manifest.tensors)
    assert optimizer.report.mispredictions == 1 and optimizer.report.traffic.params == params
    assert optimizer.report.traffic.flash_written_bytes == 2 * 12 * optimizer.store.manifest.params


def test_extents_wait_for_all_their_tensors(open_optimizer):
    """A tensor that backward does not reach keeps its extents waiting until the step."""
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward")
    backward(optimizer, tensors, 0, without=[5])
    offered = {extent.index for extent in optimizer._runner.speculator._speculative.step.offered}
    last = optimizer.store.manifest.tensors[5]
    waiting = {e.index for e in optimizer.store.manifest.extents if e.start < last.stop and last.start < e.stop}
    assert offered == {e.index for e in optimizer.store.manifest.extents} - waiting
    optimizer.step()
    assert optimizer.report.mispredictions == 0
    assert list(optimizer.store.tensor_steps) == [1, 1, 1, 1, 1, 0]


def test_accumulation_that_is_announced_is_waited_for(open_optimizer):
    tensors, others = make(), make()
    optimizer = open_optimizer(tensors, overlap="backward")
    for step in range(4):
        optimizer.zero_grad()
        with optimizer.accumulating():
            backward(optimizer, tensors, step)
        assert optimizer._runner.speculator._speculative is None
        backward(optimizer, tensors, 10 + step)
        optimizer.step()
    assert optimizer.report.mispredictions == 0
    plain = torch.optim.AdamW(others)
    for step in range(4):
        plain.zero_grad()
        backward(optimizer, others, step)
        backward(optimizer, others, 10 + step)
        plain.step()
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(tensors, others, strict=True))


def test_pauses_after_mispredictions_grow_and_end(open_optimizer):
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward", max_grad_norm=1e-3)
    began = []
    for step in range(20):
        optimizer.zero_grad()
        backward(optimizer, tensors, step)
        began.append(optimizer._runner.speculator._speculative is not None)
        optimizer.step()
    assert [step for step, begun in enumerate(began) if begun] == [0, 2, 5, 10, 19]
    assert optimizer.report.mispredictions == 5 <= LONGEST_PAUSE
    optimizer._runner.speculator.resolve(correct=True)
    assert optimizer._runner.speculator._next_pause == 1


def test_overflow_is_discarded_exactly(open_optimizer):
    """With a loss scale the step is skipped, without one it is an error; nothing was changed either way."""
    for options in ({"loss_scale": LossScale(4.0, hysteresis=1)}, {}):
        tensors = make()
        optimizer = open_optimizer(tensors, overlap="backward", resume="auto", **options)
        before = [t.detach().clone() for t in tensors]
        stored = [optimizer.store.read_array(a) for a in "pmv"]
        backward(optimizer, tensors, 0, size=float("inf"))
        settle(optimizer, 1.0)
        if options:
            optimizer.step()
            assert (optimizer.report.skipped_steps, optimizer.loss_scale) == (1, 2.0)
        else:
            with pytest.raises(NonFiniteError, match="must be finite"):
                optimizer.step()
        assert optimizer.steps == 0 and all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        assert all((optimizer.store.read_array(a) == one).all() for a, one in zip("pmv", stored, strict=True))
        optimizer.zero_grad()
        backward(optimizer, tensors, 1)
        optimizer.step()
        assert optimizer.steps == 1
        optimizer.close()
        optimizer.store.path.unlink()


def test_a_failure_during_backward_is_raised_by_step(open_optimizer, monkeypatch):
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward")
    store, real = optimizer._optimizer_state.store, optimizer._optimizer_state.store.read

    def damaged(array, extent, memory):
        if extent.index == 2:
            raise StateError("array m is damaged")
        real(array, extent, memory)

    monkeypatch.setattr(store, "read", damaged)
    backward(optimizer, tensors, 0)
    with pytest.raises(StateError, match="array m is damaged"):
        optimizer.step()
    monkeypatch.setattr(store, "read", real)
    assert optimizer.steps == 0
    optimizer.step()
    assert optimizer.steps == 1


def test_what_began_ends_with_zero_grad_and_close(open_optimizer):
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward", device="model:update-tiny")
    threads = threading.active_count()
    backward(optimizer, tensors, 0)
    assert threading.active_count() > threads
    optimizer.zero_grad()
    assert threading.active_count() == threads
    backward(optimizer, tensors, 1)
    assert optimizer._runner.speculator._speculative is not None, "a discarded one does not spoil the next"
    optimizer.close()
    assert threading.active_count() == threads - 1, "the optimizer's own has ended, too"
    backward(optimizer, tensors, 2)
    assert threading.active_count() == threads - 1, "the hooks are gone"


def test_tensors_changed_before_the_first_step(open_optimizer):
    """A checkpoint loaded after construction, even between backward and step, counts as with overlap="step"."""
    tensors = make()
    optimizer = open_optimizer(tensors, overlap="backward", lr=0.0, weight_decay=0.0)
    for value in (2.0, 3.0):
        backward(optimizer, tensors, 0)
        with torch.no_grad():
            tensors[1].fill_(value)
    optimizer.step()
    assert torch.equal(tensors[1], torch.full((10,), 3.0)) and optimizer.steps == 1
    with torch.no_grad():
        tensors[1].fill_(4.0)
    with pytest.raises(StateError, match="must be changed by this optimizer only"):
        optimizer.step()
