"""What an optimizer takes as a parameter or a gradient: memory that it can read and write; else a named error.

Each of these read address 0 or another's memory, or came as torch's own error, some after the commit.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from nearflash.abi.errors import FormatError, NoGradientWarning, ShapeError
from nearflash.verify.fixtures.forked import ForkedProgram


def fake():
    with FakeTensorMode():
        return torch.nn.Parameter(torch.ones(4, 3))


def resized(size_bytes):
    tensor = torch.nn.Parameter(torch.ones(4, 3))
    tensor.untyped_storage().resize_(size_bytes)
    return tensor


def of_inference():
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(4, 3))


BAD = {
    "meta": lambda: torch.nn.Parameter(torch.ones(4, 3, device="meta")),
    "fake": fake,
    "wrapped": lambda: torch.nn.Parameter(TwoTensor(torch.ones(4, 3), torch.ones(4, 3))),
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "without storage": lambda: resized(0),
    "with half its storage": lambda: resized(24),
    "inference_mode": of_inference,
    "expanded": lambda: torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3)),
    "overlapping": lambda: torch.nn.Parameter(torch.as_strided(torch.ones(10), (4, 3), (1, 1))),
    "sparse": lambda: torch.nn.Parameter(torch.eye(4).to_sparse()),
    "sparse csr": lambda: torch.nn.Parameter(torch.eye(4).to_sparse_csr()),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True),
    "complex": lambda: torch.nn.Parameter(torch.ones(4, 3, dtype=torch.complex64)),
    "float64": lambda: torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64)),
}


@pytest.mark.filterwarnings("ignore:.*(nested|csr|CSR)")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("when", ["construction", "add_param_group", "later group"])
def test_parameters_that_are_refused(open_optimizer, tmp_path, kind, when):
    bad, good = BAD[kind](), torch.nn.Parameter(torch.ones(5))
    if when == "construction":
        with pytest.raises(FormatError, match=r"parameter '0.1' must"):
            open_optimizer([good, bad])
        assert list(tmp_path.iterdir()) == []
        return
    optimizer = open_optimizer([good])
    good.grad = torch.ones(5)
    if when == "later group":
        optimizer.step()
    before = optimizer.store.path.read_bytes()
    with pytest.raises(FormatError, match=r"parameter '1.0' must"):
        optimizer.add_param_group({"params": [bad]})
    assert optimizer.store.path.read_bytes() == before and len(optimizer.param_groups) == 1
    optimizer.step()


@pytest.mark.parametrize("kind", ["meta", "fake", "wrapped", "lazy", "complex", "inference_mode"])
def test_frozen_ones_of_any_kind_are_taken(open_optimizer, kind):
    """They have no state: quantised base weights, for one."""
    tensor, good = BAD[kind](), torch.nn.Parameter(torch.ones(5))
    if kind == "inference_mode":
        tensor = torch.nn.Parameter(tensor, requires_grad=False)
    elif kind == "lazy":
        tensor = torch.nn.UninitializedParameter(requires_grad=False)
    else:
        tensor.requires_grad_(False)
    optimizer = open_optimizer([tensor, good])
    good.grad = torch.ones(5)
    optimizer.step()
    assert optimizer.steps == 1 and len(optimizer.store.manifest.tensors) == 1


def spoil_storage(tensor):
    tensor.untyped_storage().resize_(0)


def spoil_data(tensor):
    tensor.data = torch.ones(1, 3).expand(4, 3)


@pytest.mark.parametrize("spoil", [spoil_storage, spoil_data])
@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("call", ["step", "rollback", "accept_parameters", "load_full_state_dict", "restore"])
def test_memory_that_is_taken_away_later(open_optimizer, tmp_path, spoil, overlap, call):
    tensor = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = open_optimizer([tensor], overlap=overlap)
    for _ in range(2):
        tensor.grad = torch.ones(4, 3)
        optimizer.step()
    optimizer.store.snapshot(tmp_path / "snapshot")
    full, held, before = optimizer.full_state_dict(), tensor.data.clone(), optimizer.store.path.read_bytes()
    spoil(tensor)
    arguments = {"load_full_state_dict": [full], "restore": [tmp_path / "snapshot"]}.get(call, [])
    with pytest.raises(FormatError, match=r"parameter '0.0' must"):
        getattr(optimizer, call)(*arguments)
    assert optimizer.store.path.read_bytes() == before and optimizer.steps == 2
    tensor.data = held
    tensor.grad = torch.ones(4, 3)
    optimizer.step()
    assert optimizer.steps == 3


def gradient_without_storage():
    gradient = torch.ones(4, 3)
    gradient.untyped_storage().resize_(0)
    return gradient


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: torch.eye(4)[:, :3].to_sparse(), FormatError),
        (gradient_without_storage, FormatError),
        (lambda: TwoTensor(torch.ones(4, 3), torch.ones(4, 3)), FormatError),
        (lambda: torch.ones(3, 4), ShapeError),
    ],
)
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_gradients_that_are_refused(open_optimizer, make, error, overlap):
    """Whether they come by assignment or take the place of what backward gave."""
    tensor, other = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(5))
    optimizer = open_optimizer([tensor, other], overlap=overlap)
    (tensor.sum() + other.sum()).backward()
    if error is ShapeError:
        tensor.grad.data = make()
    else:
        try:
            tensor.grad = make()
        except (RuntimeError, TypeError):  # torch's own check
            tensor.grad.data = make()
    with pytest.raises(error, match=r"gradient of '0.0' must"):
        optimizer.step()
    assert optimizer.steps == 0
    tensor.grad = torch.ones(4, 3)
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_gradients_that_torch_takes_too(open_optimizer, overlap):
    """Expanded, transposed, of inference mode, of a subclass with memory of its own."""

    class Named(torch.nn.Parameter):
        pass

    with torch.inference_mode():
        inference = torch.full((4, 3), 2.0)
    gradients = [torch.ones(1).expand(4, 3), torch.arange(12.0).view(3, 4).t(), inference, Named(torch.ones(4, 3))]
    ours, theirs = (torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    optimizer, reference = open_optimizer([ours], overlap=overlap), torch.optim.AdamW([theirs])
    for gradient in gradients:
        ours.grad, theirs.grad = gradient, gradient.clone()
        optimizer.step()
        reference.step()
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) and optimizer.steps == 4


def test_dtensors_are_refused_by_name(tmp_path):
    """One ended in SIGSEGV, two in advice about tied weights."""
    code = f"""
import os, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from nearflash.abi.errors import FormatError
from nearflash.training import NearStorageAdamW
store = torch.distributed.FileStore({str(tmp_path / "rendezvous")!r}, 1)
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
parameters = [torch.nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])) for _ in range(2)]
for count in (1, 2):
    try:
        NearStorageAdamW(parameters[:count], path={str(tmp_path / "state")!r})
    except FormatError as error:
        print(error, flush=True)
os._exit(0)
"""
    program = ForkedProgram(code)
    output, errors = program.communicate()
    assert program.returncode == 0, errors
    assert output.count("must be a plain tensor, not a DTensor: use ShardedOptimizer") == 2


def test_all_frozen_is_no_error(open_optimizer):
    """As torch's; state comes with the first gradient."""
    tensor = torch.nn.Parameter(torch.ones(5), requires_grad=False)
    optimizer = open_optimizer([tensor])
    with pytest.warns(NoGradientWarning):
        optimizer.step()
    assert optimizer.state_dict()["state"] == {} and optimizer.steps == 0
    optimizer.load_state_dict(optimizer.state_dict())
    tensor.requires_grad_(True).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1 and optimizer.store.tensor_steps == (1,)
