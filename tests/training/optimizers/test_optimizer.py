"""The optimizer against nearflash.model (to the bit), against torch (bound), and as torch's interface demands."""

import copy
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, FormatError, NoGradientWarning, StateError
from nearflash.device import open_device
from nearflash.training import NearStorageAdamW

SCALARS = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        one = one.detach().numpy() if isinstance(one, torch.Tensor) else one
        assert np.array_equal(one.reshape(-1).view(np.uint32), other.view(np.uint32))


def assert_state(path, read_state, reference, step):
    stored_step, arrays = read_state(path)
    assert stored_step == step
    for name in ("p", "m", "v"):
        assert_same_bits(arrays[name], getattr(reference, name))


@pytest.mark.parametrize("device", ["model:update-tiny", "host:update-smartssd"])
@pytest.mark.parametrize("profile", ["ieee", "torch_fused", "deepspeed"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_equals_the_model(
    tensors, set_gradients, make_reference, read_state, open_optimizer, device, profile, decoupled
):
    reference = make_reference(tensors)
    optimizer = open_optimizer(tensors, device=device, profile=profile, decoupled=decoupled, **OPTIONS)
    for step in range(4):
        set_gradients(tensors, step)
        optimizer.step()
        reference.step(tensors, lambda i: SCALARS | {"profile": profile, "decoupled": decoupled})
        assert_same_bits(tensors, reference.p)
    optimizer.close()
    assert_state(optimizer.store.path, read_state, reference, 4)


def test_groups_schedules_and_missing_gradients(tensors, set_gradients, make_reference, read_state, open_optimizer):
    """Own scalars for each group, a learning rate that changes, and steps that skip tensors."""
    reference = make_reference(tensors)
    groups = [{"params": tensors[:2], "lr": 0.5}, {"params": tensors[2:], "weight_decay": 0.0, "betas": (0.5, 0.9)}]
    optimizer = open_optimizer(groups, **OPTIONS)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step, without in enumerate([(), (0, 3), (2,), (0, 1, 2, 3, 4), (4,), ()]):
        set_gradients(tensors, step, without)

        def scalars(i, lr=0.5**step):
            if i < 2:
                return SCALARS | {"lr": 0.5 * lr}
            return SCALARS | {"lr": 1e-2 * lr, "weight_decay": 0.0, "beta1": 0.5, "beta2": 0.9}

        reference.step(tensors, scalars)
        with nullcontext() if len(without) < 5 else pytest.warns(NoGradientWarning):
            optimizer.step()
        schedule.step()
        assert_same_bits(tensors, reference.p)
    optimizer.close()
    assert_state(optimizer.store.path, read_state, reference, 5)


@pytest.mark.parametrize(
    "name, dtypes",
    [
        (None, [torch.float16, torch.float32, torch.bfloat16]),
        ("fp16", [torch.float16, torch.float32]),
        ("bf16", [torch.bfloat16, torch.float32]),
    ],
    ids=["all", "fp16", "bf16"],
)
def test_low_precision_tensors(tensors, set_gradients, make_reference, read_state, open_optimizer, name, dtypes):
    """fp16 or bf16 tensors get the rounded copy, fp32 ones beside them the parameter itself."""
    mixed = [torch.nn.Parameter(t.detach().to(dtypes[i % len(dtypes)])) for i, t in enumerate(tensors)]
    reference = make_reference(mixed)
    optimizer = open_optimizer(mixed, param_dtype=name, **OPTIONS)
    for step in range(3):
        set_gradients(mixed, step)
        optimizer.step()
        reference.step(mixed, lambda i: SCALARS)
    for tensor, p in zip(mixed, reference.p, strict=True):
        assert torch.equal(tensor.detach().reshape(-1), torch.from_numpy(p).to(tensor.dtype))
    optimizer.close()
    assert_state(optimizer.store.path, read_state, reference, 3)


def test_one_step_within_the_bound_of_torch(tensors, set_gradients, open_optimizer):
    """(|p - p_torch| - 1 ulp of p) / |update| <= 1e-6, element by element."""
    theirs = copy.deepcopy(tensors)
    set_gradients(tensors, 0)
    set_gradients(theirs, 0)
    before = [t.detach().clone() for t in tensors]
    open_optimizer(tensors, **OPTIONS).step()
    torch.optim.AdamW(theirs, **OPTIONS).step()
    for old, mine, other in zip(before, tensors, theirs, strict=True):
        mine, other, old = (t.detach().reshape(-1) for t in (mine, other, old))
        error = (mine.double() - other.double()).abs()
        ulp = torch.from_numpy(np.spacing(other.abs().numpy())).double()
        assert bool((error <= ulp + 1e-6 * (other.double() - old.double()).abs()).all())


def test_many_steps_stay_near_torch(tensors, set_gradients, open_optimizer):
    theirs = copy.deepcopy(tensors)
    mine, other = open_optimizer(tensors, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(20):
        set_gradients(tensors, step)
        set_gradients(theirs, step)
        mine.step()
        other.step()
    for one, two in zip(tensors, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def test_open_device_is_used_and_left_open(tensors, set_gradients, open_optimizer):
    with open_device("model:update-tiny") as device:
        optimizer = open_optimizer(tensors, device=device)
        set_gradients(tensors, 0)
        optimizer.step()
        optimizer.close()
        device.free(device.allocate(4096))


def test_device_without_p2p(tensors, set_gradients, make_reference, read_state, open_optimizer):
    """The same bits through host memory, and the detour is counted on the host link."""
    reference = make_reference(tensors)
    device = open_device("model:update-tiny")
    allocate = device.allocate

    def without_window(size_bytes):
        buffer = allocate(size_bytes)
        hidden = copy.copy(buffer)
        hidden.p2p = None
        hidden.sync_to_device = buffer.sync_to_device
        hidden.sync_from_device = buffer.sync_from_device
        return hidden

    device.allocate = without_window
    optimizer = open_optimizer(tensors, device=device, **OPTIONS)
    set_gradients(tensors, 0)
    optimizer.step()
    reference.step(tensors, lambda i: SCALARS)
    optimizer.close()
    assert_state(optimizer.store.path, read_state, reference, 1)
    assert optimizer.report.traffic.host_link_bytes == 8 * optimizer.report.traffic.params + 24 * 3072


def test_traffic_is_counted(open_optimizer, tmp_path):
    """fp32: 4 bytes down and 4 up. bf16: 2 each way. Conventional: p, m, v each way."""
    for index, (dtype, name, width) in enumerate([(torch.float32, None, 4), (torch.bfloat16, "bf16", 2)]):
        tensor = torch.nn.Parameter(torch.ones(3 * 1024, dtype=dtype))
        optimizer = open_optimizer([tensor], param_dtype=name, path=tmp_path / str(index))
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        traffic = optimizer.report.traffic
        assert (traffic.steps, traffic.params) == (1, 3072)
        assert (traffic.to_device_bytes, traffic.from_device_bytes) == (width * 3072, width * 3072)
        assert (traffic.flash_read_bytes, traffic.flash_written_bytes) == (12 * 3072, 12 * 3072)
        assert (traffic.conventional_bytes, traffic.conventional_bytes_with_gradients) == (24 * 3072, 32 * 3072)
        assert traffic.counters["params_done"] == 3072


# As torch's interface demands


def test_closure_hooks_and_zero_grad(tensors, open_optimizer):
    optimizer, calls = open_optimizer(tensors), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure():
        optimizer.zero_grad()
        loss = sum((t * t).sum() for t in tensors)
        loss.backward()
        calls.append("closure")
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() < first
    assert calls == ["pre", "closure", "post"] * 2
    optimizer.zero_grad()
    assert all(t.grad is None for t in tensors)
    with pytest.warns(NoGradientWarning):
        optimizer.step()
    assert optimizer.steps == 2


def test_state_dict_is_a_light_handle(tensors, set_gradients, open_optimizer):
    """What accelerate does at construction: state_dict, copy, load_state_dict."""
    optimizer = open_optimizer(tensors, lr=0.25)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_gradients(tensors, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    handle = {"step": 1, "nearflash_identity": int(optimizer.store.identity, 16), "nearflash_step": 1}
    assert saved["state"] == dict.fromkeys(range(5), handle)
    assert saved["param_groups"][0]["lr"] == 0.25 and saved["param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.step()
    with pytest.raises(StateError, match=r"state_dict must be of step 2 as in .*, not 1;"):
        optimizer.load_state_dict(saved)


def test_foreign_state_dict_is_refused(tensors, open_optimizer, tmp_path):
    optimizer = open_optimizer(tensors)
    with pytest.raises(StateError, match="must come from a NearStorageAdamW"):
        optimizer.load_state_dict(torch.optim.AdamW(tensors).state_dict())
    other = open_optimizer(tensors, path=tmp_path / "other")
    with pytest.raises(StateError, match="must be of identity"):
        optimizer.load_state_dict(other.state_dict())


def test_groups_may_be_added_before_the_first_step(tensors, set_gradients, make_reference, read_state, open_optimizer):
    reference = make_reference(tensors)
    optimizer = open_optimizer(tensors[:2], **OPTIONS)
    optimizer.add_param_group({"params": tensors[2:], "lr": 1.0})
    set_gradients(tensors, 0)
    optimizer.step()
    reference.step(tensors, lambda i: SCALARS | ({} if i < 2 else {"lr": 1.0}))
    optimizer.close()
    assert_state(optimizer.store.path, read_state, reference, 1)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_rollback_is_exact(tensors, set_gradients, open_optimizer, overlap):
    """Undone and done again, from device memory that still holds the undone state: the same bits."""
    optimizer = open_optimizer(tensors, overlap=overlap, resident_bytes=1 << 20, loss_scale="dynamic")
    optimizer.metadata["cursor"] = 1
    for step in range(2):
        set_gradients(tensors, step)
        optimizer.step()
    before, stored = [t.detach().clone() for t in tensors], [optimizer.store.read_array(a) for a in "pmv"]
    after = []
    for seed in (7, 2, 2):
        optimizer.metadata["cursor"] = seed
        set_gradients(tensors, seed)
        optimizer.step()
        after.append([t.detach().clone() for t in tensors])
        optimizer.rollback()
        assert optimizer.steps == 2 and optimizer.metadata == {"cursor": 1}
        assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
        assert all(np.array_equal(optimizer.store.read_array(a), one) for a, one in zip("pmv", stored, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after[1], after[2], strict=True))
    with pytest.raises(StateError):
        optimizer.rollback()


def test_tied_tensor_has_one_state(tensors, set_gradients, make_reference, open_optimizer):
    reference = make_reference(tensors[:1])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = open_optimizer([tensors[0], tensors[0]], **OPTIONS)
    set_gradients(tensors, 0)
    optimizer.step()
    reference.step(tensors[:1], lambda i: SCALARS)
    assert_same_bits(tensors[:1], reference.p)


def test_names_come_from_named_parameters(tmp_path):
    model = torch.nn.Linear(3, 2)
    with NearStorageAdamW(model.named_parameters(), path=tmp_path) as optimizer:
        assert optimizer.store.path == tmp_path / "optimizer.state"
        assert [t.name for t in optimizer.store.manifest.tensors] == ["weight", "bias"]


def test_works_with_a_gradient_scaler(tensors, open_optimizer, set_gradients):
    """Infinite gradients: the scaler skips the step; finite ones: it unscales them first."""
    optimizer = open_optimizer(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor, steps in ((float("inf"), 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale(factor * sum((t * t).sum() for t in tensors)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.steps == steps


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"lr": -1.0}, CommandError, "lr must be finite and at least 0, not -1.0"),
        ({"betas": (1.0, 0.9)}, CommandError, r"beta1 must be in \[0, 1\), not 1.0"),
        ({"param_dtype": "fp8"}, FormatError, "param_dtype must be None, 'fp32', 'fp16' or 'bf16', not 'fp8'"),
        ({"profile": "fast"}, FormatError, "profile must be one of ieee, torch_fused, deepspeed, not 'fast'"),
        ({"resume": True}, StateError, "must be a state file, not a missing one"),
    ],
)
def test_bad_arguments(tensors, open_optimizer, tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        open_optimizer(tensors, **options)
    assert list(tmp_path.iterdir()) == []


def test_unknown_dtype_is_refused(open_optimizer, tmp_path):
    for dtype, copy_name, message in [
        (torch.float64, None, "must be float32 or float16 or bfloat16, not float64"),
        (torch.float16, "fp32", "must be float32, not float16"),
        (torch.float16, "bf16", "must be float32 or bfloat16, not float16"),
    ]:
        with pytest.raises(FormatError, match=message):
            open_optimizer([torch.nn.Parameter(torch.ones(4, dtype=dtype))], param_dtype=copy_name)
    assert list(tmp_path.iterdir()) == []
