"""Gradients that leave memory during backward: the same bits, nothing of them left in memory, errors by name."""

import pytest
import torch

from nearflash.abi.errors import CommandError, NoGradientWarning, NonFiniteError, StateError, StorageFullError
from nearflash.storage.io.direct import DirectFile
from nearflash.training import NearStorageAdamW, TopK


def make(dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 90), torch.nn.ReLU(), torch.nn.Linear(90, 33), torch.nn.Linear(33, 1)
    )
    return model.to(dtype)


def open_optimizer(model, path, *, free=True, **options):
    overlap = {"overlap": "backward", "free_gradients": True} if free else {}
    return NearStorageAdamW(model.parameters(), lr=1e-2, path=path, extent_params=1024, **overlap, **options)


def backward(model, step, passes=1):
    for micro in range(passes):
        generator = torch.Generator().manual_seed(10 * step + micro)
        x = torch.randn(5, 40, generator=generator).to(next(model.parameters()).dtype)
        (model(x).float().square().mean() * 10.0**step).backward()


def train(model, optimizer, steps=4, passes=1, norms=None):
    for step in range(steps):
        backward(model, step, passes)
        assert (norms is None) or all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        if norms is not None:
            norms.append(optimizer.report.grad_norm)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.5}, {}, {"compression": TopK(0.1, warmup_steps=0)}, {"state_format": "mx8"}]
)
@pytest.mark.parametrize("passes", [1, 3])
def test_bits_are_those_of_gradients_in_memory(tmp_path, dtype, options, passes):
    norms = []
    with open_optimizer(model := make(dtype), tmp_path / "free", **options) as optimizer:
        freed = train(model, optimizer, passes=passes, norms=norms)
        last = optimizer.report.grad_norm
        assert len(set(norms)) == 4 and all(norms) and optimizer.report.traffic.flash_read_bytes
    with open_optimizer(model := make(dtype), tmp_path / "plain", free=False, **options) as optimizer:
        kept = train(model, optimizer, passes=passes)
        assert optimizer.report.grad_norm == last
    assert all(torch.equal(a, b) for a, b in zip(freed, kept, strict=True))


def test_no_step_counts_gradients_of_another(tmp_path):
    """zero_grad, a step that was skipped and one that was made forget them; an error keeps them."""
    with open_optimizer(model := make(), tmp_path / "a", loss_scale=4.0) as optimizer:
        backward(model, 0)
        optimizer.zero_grad()
        with pytest.warns(NoGradientWarning):
            optimizer.step()
        assert optimizer.steps == 0, "nothing to do"
        model(torch.full((1, 40), float("inf"), dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert optimizer.steps == 0 and optimizer.report.skipped_steps == 1
        backward(model, 1)
        optimizer.step()
        assert optimizer.steps == 1
        optimizer.step()
        assert optimizer.steps == 1
    with open_optimizer(model := make(), tmp_path / "b", max_grad_norm=1.0) as optimizer:
        model(torch.full((1, 40), float("inf"), dtype=torch.bfloat16)).sum().backward()
        for _ in range(2):
            with pytest.raises(NonFiniteError, match=r"gradient of '0.0' must be finite, not NaN or infinite in"):
                optimizer.step()
        optimizer.zero_grad()
        backward(model, 0)
        model[3].bias.grad = torch.full((1,), 2.0, dtype=torch.bfloat16)  # in the place of what backward gave
        optimizer.step()
        assert optimizer.steps == 1


def test_tensors_that_come_later_keep_their_gradients_in_memory_or_not(tmp_path):
    def run(path, free):
        model, more = make(), torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
        model[2].requires_grad_(False)
        with open_optimizer(model, path, free=free, max_grad_norm=1.0) as optimizer:
            train(model, optimizer, 2)
            model[2].requires_grad_(True)
            optimizer.add_param_group({"params": [more]})
            for step in range(3):
                (model(more[None] + step).float().sum() + more.float().sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().clone() for p in (*model.parameters(), more)]

    assert all(map(torch.equal, run(tmp_path / "a", True), run(tmp_path / "b", False)))


def test_no_room_for_them(tmp_path, monkeypatch):
    real = DirectFile._reserve

    def reserve(file, size_bytes):
        if file.path.name.endswith(".gradients"):
            raise StorageFullError("no room while reserving")
        real(file, size_bytes)

    monkeypatch.setattr(DirectFile, "_reserve", reserve)
    with pytest.raises(StorageFullError, match=r"free_gradients must have room for 32768 bytes of gradients beside"):
        open_optimizer(make(), tmp_path / "state")
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_could_not_be_written_is_no_gradient(tmp_path, monkeypatch):
    with open_optimizer(model := make(), tmp_path / "state") as optimizer:
        assert [path.name for path in tmp_path.iterdir()] == ["state"], "the file has no name"
        scratch = optimizer._optimizer_state.scratch

        def failing(*_):
            raise StateError("writing failed")

        with monkeypatch.context() as patch:
            patch.setattr(scratch._file, "write", failing)
            with pytest.raises(StateError, match="writing failed"):
                backward(model, 0)
        with pytest.raises(StateError, match=r"gradients must be complete, but one could not be written .*zero_grad"):
            optimizer.step()
        assert optimizer.steps == 0
        optimizer.zero_grad()
        train(model, optimizer, 1)
        assert optimizer.steps == 1
    backward(model, 0)
    assert all(parameter.grad is not None for parameter in model.parameters()), "closed: gradients stay"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "step"}, r'free_gradients must be False with overlap="step"'),
        ({"overlap": "backward", "sum_of_squares": lambda _: 0.0}, "free_gradients must be False with sum_of_squares"),
    ],
)
def test_options_that_exclude_each_other(tmp_path, options, message):
    with pytest.raises(CommandError, match=message):
        NearStorageAdamW(make().parameters(), path=tmp_path / "state", free_gradients=True, **options)
