"""master="split": the bits of an fp32 master, in two halves of which one is the model's own weight."""

import numpy as np
import pytest
import torch

from nearflash.abi.errors import CommandError, FormatError, StateError
from nearflash.storage import Manifest, StateStore
from nearflash.storage.state.master import round_master
from nearflash.training import NearStorageAdamW

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "extent_params": 1024, "direct": False}


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(24, 96), torch.nn.GELU(), torch.nn.Linear(96, 24), torch.nn.LayerNorm(24)]
    return torch.nn.Sequential(*layers).to(dtype)


def open_optimizer(path, model, **options):
    return NearStorageAdamW(model.named_parameters(), path=path, **OPTIONS | options)


def put_gradients(model, step, of=None):
    """Of a loss of `of` (the model unless given), whose weights only have them rounded."""
    of = of or model
    torch.manual_seed(100 + step)
    of.zero_grad()
    of(torch.randn(8, 24, dtype=torch.bfloat16)).square().mean().backward()
    for parameter, other in zip(model.parameters(), of.parameters(), strict=True):
        parameter.grad = other.grad.clone()


def train(optimizer, model, steps=1):
    for _ in range(steps):
        put_gradients(model, optimizer.steps)
        optimizer.step()


def words(model):
    return [p.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1).copy() for p in model.parameters()]


def masters(optimizer):
    """fp32 bits of each tensor."""
    p, manifest = optimizer.store.read_array("p").view(np.uint32), optimizer.store.manifest
    return [p[entry.start : entry.start + entry.params] for entry in manifest.tensors]


def assert_same(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "mx8"])
@pytest.mark.parametrize("options", [{}, {"overlap": "backward"}, {"max_grad_norm": 1e-3, "resident_bytes": 1 << 20}],
                         ids=["step", "backward", "resident"])  # fmt: skip
def test_20_steps_and_a_resumption_have_the_bits_of_an_fp32_master(tmp_path, state_format, options):
    """And the weights are those masters, rounded to nearest with ties away from zero."""
    model, other = make_model(), make_model()
    options |= {"state_format": state_format}
    split = open_optimizer(tmp_path / "split", model, master="split", **options)
    whole = open_optimizer(tmp_path / "whole", other, **options)
    for step in range(20):
        if step == 10:
            split.close()
            model = make_model()
            split = open_optimizer(tmp_path / "split", model, master="split", resume=True, **options)
        put_gradients(model, step)
        put_gradients(other, step, of=model)
        split.step()
        whole.step()
        assert_same(masters(split), masters(whole))
    assert_same(words(model), [round_master(p.view(np.float32)) for p in masters(split)])
    for name in split.store.manifest.arrays[1:]:
        np.testing.assert_array_equal(split.store.read_array(name.name), whole.store.read_array(name.name))
    assert split.store.verify() == []
    split.close()
    whole.close()


def test_only_the_rest_is_read_from_the_file(tmp_path):
    """Bytes a parameter of a step: 2 + 4 + 4 read and 2 + 2 + 4 + 4 written with fp32 moments."""
    params = 1 << 17  # scales, a byte for 32, then fill their blocks of 4,096
    for state_format, moments in (("fp32", 8), ("bf16", 4), ("mx8", 2 + 2 / 32)):
        weight = torch.nn.Parameter(torch.ones(params, dtype=torch.bfloat16))
        options = OPTIONS | {"extent_params": params, "state_format": state_format}
        optimizer = NearStorageAdamW([weight], path=tmp_path / state_format, master="split", **options)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        traffic = optimizer.report.traffic
        assert traffic.flash_read_bytes / params == 2 + moments
        assert traffic.flash_written_bytes / params == 4 + moments
        optimizer.close()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_weights_are_refused_by_name(tmp_path, dtype):
    model = make_model(getattr(torch, dtype))
    with pytest.raises(
        FormatError, match=f"parameter '0.weight' must be bfloat16, not {dtype}, as its master is split"
    ):
        open_optimizer(tmp_path / "a", model, master="split")
    assert not list(tmp_path.iterdir())
    with pytest.raises(FormatError, match="param_dtype must be None or 'bf16' with a split master, not 'fp16'"):
        open_optimizer(tmp_path / "a", model, master="split", param_dtype="fp16")
    with pytest.raises(FormatError, match="master must be one of fp32, split, not 'halves'"):
        open_optimizer(tmp_path / "a", model, master="halves")


@pytest.mark.parametrize("first", ["split", "fp32"])
def test_a_resumed_state_keeps_its_master(tmp_path, first):
    second = {"split": "fp32", "fp32": "split"}[first]
    open_optimizer(tmp_path / "a", make_model(), master=first).close()
    model = make_model()
    before = words(model)
    with pytest.raises(StateError, match=f"master must be '{first}' as in .*, not '{second}'; pass that"):
        open_optimizer(tmp_path / "a", model, master=second, resume=True)
    assert_same(words(model), before)


def test_a_weight_that_was_changed_is_refused_and_can_be_accepted(tmp_path, monkeypatch):
    """By the fingerprints; and, were it changed after they were taken, by the checksum of what was written."""
    model = make_model()
    optimizer = open_optimizer(tmp_path / "a", model, master="split")
    train(optimizer, model, 2)
    before = masters(optimizer)
    model[0].weight.data[1, 2] = 3.0
    put_gradients(model, 2)
    with pytest.raises(StateError, match=r"'0\.weight' must be changed by this optimizer only"):
        optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._optimizer_state.flat, "find_changed", lambda **_: [])
        patch.setattr(optimizer._runner, "_accept", lambda *_: None)
        with pytest.raises(StateError, match=r"the weights in '0\.weight' .*are not those of step 2: call accept"):
            optimizer.step()
    assert_same(masters(optimizer), before)
    optimizer.accept_parameters()
    before[0][26] = 0x40400000
    assert_same(masters(optimizer), before)
    optimizer.step()
    assert optimizer.steps == 3
    optimizer.close()


def test_the_status_tells_the_halves_and_older_programs_refuse_the_file(tmp_path, capsys):
    from nearflash.cli.main import main

    optimizer = open_optimizer(tmp_path / "a", make_model(), master="split")
    optimizer.close()
    assert main(["state", "status", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "array weight: 2 bytes\narray rest: 2 bytes\narray m: 4 bytes, exp_avg" in out
    with StateStore.open(tmp_path / "a", direct=False) as store:
        listed = store.manifest.to_json()
        assert [array["name"] for array in listed["arrays"]] == ["weight", "rest", "m", "v"]
        assert "master" not in listed
        assert Manifest.from_json(listed) == store.manifest
    with pytest.raises(StateError, match="a manifest must have no master"):
        Manifest.from_json(listed | {"master": "fp32"})
    with pytest.raises(StateError, match="arrays must begin with"):
        Manifest.from_json(listed | {"arrays": listed["arrays"][1:]})


def test_a_device_without_the_format_is_refused_before_a_file_is_made(tmp_path, monkeypatch):
    from nearflash.device.backends.host.update import HostDevice

    with HostDevice.open("update-smartssd") as device:
        device.build = device.identity.config
        with pytest.raises(CommandError, match="master must be fp32 on update-smartssd, not split"):
            open_optimizer(tmp_path / "a", make_model(), master="split", device=device)
    assert not list(tmp_path.iterdir())
