"""Muon beside AdamW in one store: against torch's optimizers, and to the bit against the model of its two passes."""

import numpy as np
import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from nearflash.abi.errors import CommandError, ShapeError
from nearflash.abi.optimizers import SgdStep
from nearflash.model.update.lane import optimizer_step
from nearflash.training import NearStorageMuon, TopK
from nearflash.training.integrations.shards import ShardedOptimizer
from nearflash.training.step.muon import MuonStep, orthogonalize

SHAPES = {"wide": (48, 96), "tall": (100, 30), "square": (64, 64), "row": (1, 70), "long": (33, 41)}
REST = {"embed": (50, 16), "norm": (77,), "scale": ()}


def make(shapes, dtype=torch.float32):
    torch.manual_seed(7)
    return {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def set_gradients(tensors, step):
    generator = torch.Generator().manual_seed(50 + step)
    for index, tensor in enumerate(tensors.values()):
        tensor.grad = (torch.randn(tensor.shape, generator=generator) * 10.0 ** (index - 3)).to(tensor.dtype)


def open_optimizer(matrices, rest, path, *, adamw=None, **options):
    groups = [{"params": list(matrices.items())}]
    if rest:
        groups.append({"params": list(rest.items()), "use_muon": False, **(adamw or {})})
    return NearStorageMuon(groups, **({"path": path, "extent_params": 1024, "lr": 0.02} | options))


SCALARS = [
    {},
    {"nesterov": False, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.6},
    {"momentum": 0.0, "weight_decay": 0.3},
    {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
]


@pytest.mark.parametrize("scalars", SCALARS, ids=str)
def test_elements_are_those_of_torch(tmp_path, scalars):
    """Each element within a fiftieth of the step's largest change: m' differs by its last bit, which bf16 may see."""
    mine, theirs = make(SHAPES), make(SHAPES)
    rest, their_rest = make(REST), make(REST)
    given = {"lr": 0.02} | scalars
    muon, adamw = torch.optim.Muon(theirs.values(), **given), torch.optim.AdamW(their_rest.values(), lr=1e-3)
    with open_optimizer(mine, rest, tmp_path / "state", profile="torch_fused", **scalars) as optimizer:
        for step in range(4):
            for tensors in (mine, theirs, rest, their_rest):
                set_gradients(tensors, step)
            before = {name: tensor.detach().clone() for name, tensor in theirs.items()}
            optimizer.step()
            muon.step()
            adamw.step()
            for name, tensor in theirs.items():
                largest = (tensor - before[name]).abs().max()
                assert ((mine[name] - tensor).abs() <= 0.02 * (step + 1) * largest).all(), (name, step)
                moment = optimizer.full_state_dict()["state"][list(SHAPES).index(name)].get("momentum_buffer")
                if given.get("momentum", 0.95):
                    expected = muon.state[tensor]["momentum_buffer"]
                    assert ((moment - expected).abs() <= 4e-7 * expected.abs().max()).all()
        assert all(torch.allclose(rest[name], their_rest[name], rtol=1e-5, atol=1e-6) for name in rest)


def reference(tensors, steps, rule_of, scalar=1.0):
    """p after the steps, by the model of rule sgd, and torch's orthogonalisation."""
    p = {name: tensor.detach().float().numpy().reshape(-1).copy() for name, tensor in tensors.items()}
    m = {name: np.zeros_like(values) for name, values in p.items()}
    for step in range(steps):
        set_gradients(tensors, step)
        for name, tensor in tensors.items():
            rule, g = rule_of(step + 1), tensor.grad.float().numpy().reshape(-1)
            moment = SgdStep(0.0, step + 2, rule.momentum, rule.momentum, profile=rule.profile)
            m[name] = optimizer_step(moment, g, p[name], m[name]).m
            new = torch.from_numpy(m[name])
            ahead = torch.from_numpy(g).lerp(new, rule.momentum).view(tensor.shape)
            u = _zeropower_via_newtonschulz(ahead, rule.coefficients, rule.ns_steps, rule.eps)
            apply = rule.application(tuple(tensor.shape))
            p[name] = optimizer_step(apply, u.float().numpy().reshape(-1), p[name]).p
    return p, m


@pytest.mark.parametrize("profile", ["ieee", "torch_fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"device": ["host", "model:update-tiny"]}, {"overlap": "backward"}, {"resident_bytes": 1 << 20},
        {"overlap": "backward", "free_gradients": True},
    ],
    ids=str,
)  # fmt: skip
def test_bits_are_those_of_the_model(tmp_path, profile, dtype, options):
    matrices, rest = make(SHAPES, dtype), make(REST, dtype)
    paths = [tmp_path / "a", tmp_path / "b"] if "device" in options else tmp_path / "a"
    expected, moments = reference(make(SHAPES, dtype), 3, lambda step: MuonStep(0.02, step, profile=profile))
    with open_optimizer(matrices, rest, paths, profile=profile, **options) as optimizer:
        for step in range(3):
            for tensors in (matrices, rest):
                set_gradients(tensors, step)
            optimizer.step()
        full = optimizer.full_state_dict()["state"]
        for index, (name, tensor) in enumerate(matrices.items()):
            master = full[index].get("master", tensor.detach()).numpy().reshape(-1)
            assert np.array_equal(master, expected[name]), name
            assert np.array_equal(full[index]["momentum_buffer"].numpy().reshape(-1), moments[name])
            assert full[index].keys() == {"step", "momentum_buffer"} | ({"master"} if dtype != torch.float32 else set())
        assert full[len(SHAPES)].keys() >= {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("state_format", ["fp32", "bf16", "mx8"])
def test_resume_is_exact_and_full_state_goes_round(tmp_path, state_format):
    def run(path, stops):
        matrices, rest = make(SHAPES, torch.bfloat16), make(REST, torch.bfloat16)
        for stop in stops:
            with open_optimizer(matrices, rest, path, state_format=state_format, resume="auto") as optimizer:
                while optimizer.steps < stop:
                    set_gradients(matrices, optimizer.steps)
                    set_gradients(rest, optimizer.steps)
                    optimizer.step()
                arrays = {name: optimizer.store.read_array(name) for name in ("p", "m", "v")}
                full = optimizer.full_state_dict()
        return arrays, full, [*matrices.values(), *rest.values()]

    whole, parts = run(tmp_path / "a", [5]), run(tmp_path / "b", [2, 3, 5])
    assert all(np.array_equal(whole[0][name], parts[0][name]) for name in whole[0])
    assert all(map(torch.equal, whole[2], parts[2]))
    if state_format == "fp32":
        matrices, rest = make(SHAPES, torch.bfloat16), make(REST, torch.bfloat16)
        with open_optimizer(matrices, rest, tmp_path / "c") as optimizer:
            optimizer.load_full_state_dict(whole[1])
            assert np.array_equal(optimizer.store.read_array("m"), whole[0]["m"])
            assert all(map(torch.equal, [*matrices.values(), *rest.values()], whole[2]))


def test_state_of_torch_is_loaded(tmp_path):
    theirs, mine = make(SHAPES), make(SHAPES)
    muon = torch.optim.Muon(theirs.values(), lr=0.02)
    for step in range(2):
        set_gradients(theirs, step)
        muon.step()
    with open_optimizer(mine, {}, tmp_path / "state", profile="torch_fused") as optimizer:
        with torch.no_grad():
            for name, tensor in theirs.items():
                mine[name].copy_(tensor)
        optimizer.load_full_state_dict(muon.state_dict())
        full = optimizer.full_state_dict()["state"]
        for index, tensor in enumerate(theirs.values()):
            assert torch.equal(full[index]["momentum_buffer"], muon.state[tensor]["momentum_buffer"])


def test_orthogonalisation_is_that_of_torch():
    for shape in ((30, 70), (70, 30), (64, 64), (1, 5)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        rule = MuonStep(0.1, 1)
        expected = _zeropower_via_newtonschulz(matrix, rule.coefficients, rule.ns_steps, rule.eps)
        assert torch.equal(orthogonalize(matrix, rule), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compression": TopK(0.1)}, CommandError, "compression must be None for Muon"),
        ({"momentum": 1.0}, CommandError, r"momentum must be in \[0, 1\), not 1.0"),
        ({"ns_steps": 100}, CommandError, "ns_steps must be from 0 to 99, not 100"),
        ({"eps": 0.0}, CommandError, "eps must be positive and finite, not 0.0"),
        ({"adjust_lr_fn": "other"}, CommandError, "adjust_lr_fn must be None, 'original' or 'match_rms_adamw'"),
        ({"ns_coefficients": (1.0, 2.0)}, CommandError, "a parameter group must have numbers for"),
        ({"profile": "deepspeed"}, CommandError, "profile must be ieee or torch_fused"),
    ],
)
def test_values_out_of_range(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        open_optimizer(make(SHAPES), {}, tmp_path / "state", **options)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_whole_matrix_is_rejected(tmp_path):
    for params in ([torch.nn.Parameter(torch.ones(3))], [("cube", torch.nn.Parameter(torch.ones(2, 2, 2)))]):
        with pytest.raises(
            ShapeError, match=r"parameter '(0|cube)' of a group must be a matrix for Muon, not of shape"
        ):
            NearStorageMuon(params, path=tmp_path / "state")
    with pytest.raises(TypeError, match="ordered"):
        NearStorageMuon([{"params": set(make(SHAPES).values())}], path=tmp_path / "state")
    with pytest.raises(CommandError, match="kind must update elements by themselves, not NearStorageMuon"):
        ShardedOptimizer([], kind=NearStorageMuon, path=tmp_path)
    with open_optimizer(make(SHAPES), rest := make(REST), tmp_path / "state") as optimizer:
        set_gradients(rest, 0)
        optimizer.param_groups[1]["use_muon"] = True
        with pytest.raises(CommandError, match=r"parameter 'norm' must be a matrix for Muon, not of shape \(77,\)"):
            optimizer.step()
        assert optimizer.steps == 0
