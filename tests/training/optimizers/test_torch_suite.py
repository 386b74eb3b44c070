"""What torch's own test_optim.py asks of every optimizer, of ours. (It is not installed; after its names.)"""

import itertools

import pytest
import torch
from torch.optim import lr_scheduler

import nearflash.training as training
from nearflash.abi.errors import CommandError, FormatError, NoGradientWarning, StateError

ALL = ["Adagrad", "Adam", "AdamW", "Lion", "SGD"]


@pytest.fixture(params=ALL)
def make(request, tmp_path):
    """An optimizer of one of the classes; all are closed at the end."""
    made = []

    def opened(params, **options):
        path = tmp_path / f"state{len(made)}"
        made.append(getattr(training, f"NearStorage{request.param}")(params, path=path, lr=0.05, **options))
        return made[-1]

    yield opened
    for optimizer in made:
        optimizer.close()


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.linspace(-1, 1, 50))


def run(optimizer, weight, steps):
    """Minimise the squares; the loss of each step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_forloop_goes_right_direction(make, weight):
    losses = run(make([weight]), weight, 12)
    assert all(later < before for before, later in itertools.pairwise(losses))


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_forloop_goes_right_direction_with_schedulers(make, weight, kind):
    """The rates are those that torch's SGD gets, and each step takes the one of its time."""
    ours, theirs = make([weight]), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
    schedulers = SCHEDULERS[kind](ours), SCHEDULERS[kind](theirs)
    before = weight.detach().clone()
    for _ in range(6):
        run(ours, weight, 1)
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    ours.param_groups[0]["lr"] = 0.0
    assert not torch.equal(weight, before)
    before = weight.detach().clone()
    run(ours, weight, 1)
    assert torch.equal(weight, before)


def test_reduce_on_plateau(make, weight):
    optimizer = make([weight])
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for _ in range(3):
        run(optimizer, weight, 1)
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.0125


def test_param_groups_lr_and_weight_decay(make, weight):
    other = torch.nn.Parameter(weight.detach().clone())
    optimizer = make([{"params": [weight], "lr": 0.0}, {"params": [other], "weight_decay": 0.5}])
    before = weight.detach().clone()
    (weight.sum() + other.sum()).backward()
    optimizer.step()
    assert torch.equal(weight, before) and not torch.equal(other, before)


def test_step_is_noop_when_params_have_no_grad(make, weight):
    """A loop over `optimizer.steps` ran for ever, unwarned, where the model's parameters had been replaced."""
    optimizer, before = make([weight]), weight.detach().clone()
    with pytest.warns(NoGradientWarning, match="no parameter has a gradient"):
        optimizer.step()
    optimizer.step()
    assert torch.equal(weight, before) and optimizer.steps == 0


def test_step_is_noop_for_empty_grads(make, weight):
    empty = torch.nn.Parameter(torch.empty(0, 3))
    optimizer = make([empty, weight])
    (empty.sum() + weight.sum()).backward()
    optimizer.step()
    assert empty.shape == (0, 3)


def test_grads_are_never_inplaced_into(make, weight):
    optimizer = make([weight], weight_decay=0.3)
    weight.grad = torch.linspace(2, 3, 50)
    before, version = weight.grad.clone(), weight.grad._version
    optimizer.step()
    assert torch.equal(weight.grad, before) and weight.grad._version == version


def test_step_hooks(make, weight):
    optimizer, called = make([weight]), []
    pre = optimizer.register_step_pre_hook(lambda o, args, kwargs: called.append("before"))
    post = optimizer.register_step_post_hook(lambda o, args, kwargs: called.append("after"))
    run(optimizer, weight, 1)
    pre.remove()
    run(optimizer, weight, 1)
    post.remove()
    run(optimizer, weight, 1)
    assert called == ["before", "after", "after"]


def test_state_dict_hooks(make, weight):
    optimizer, called = make([weight]), []
    optimizer.register_state_dict_pre_hook(lambda o: called.append("state_dict"))
    optimizer.register_load_state_dict_post_hook(lambda o: called.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["state_dict", "loaded"]


def test_save_load_equality_with_weights_only(make, weight, tmp_path):
    optimizer = make([weight])
    run(optimizer, weight, 2)
    torch.save(optimizer.state_dict(), tmp_path / "saved")
    loaded = torch.load(tmp_path / "saved", weights_only=True)
    optimizer.load_state_dict(loaded)
    assert optimizer.steps == 2


def test_closure_is_called_once_with_gradients_enabled(make, weight):
    optimizer, calls = make([weight]), []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True] and float(loss.detach()) > 0


@pytest.mark.parametrize("params", [[], None, 3, [3], [torch.zeros(3, requires_grad=True) * 2]])
def test_parameters_that_are_none(make, params):
    with pytest.raises((TypeError, ValueError)):
        make(params)


def test_duplicate_params(make, weight):
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        make([{"params": [weight]}, {"params": [weight]}])


def test_complex_and_sparse_are_rejected(make, weight):
    with pytest.raises(FormatError, match="complex64"):
        make([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    optimizer = make([weight])
    weight.grad = torch.zeros(50).to_sparse()
    with pytest.raises(FormatError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("option, value", [("lr", -1.0), ("lr", float("nan")), ("weight_decay", -0.1)])
def test_errors_of_settings(make, weight, option, value):
    optimizer = make([weight])
    weight.grad = torch.ones(50)
    before = weight.detach().clone()
    optimizer.param_groups[0][option] = value
    with pytest.raises(CommandError, match=option):
        optimizer.step()
    assert torch.equal(weight, before) and optimizer.steps == 0


def test_after_close_nothing_is_trained(make, weight):
    optimizer = make([weight])
    optimizer.close()
    with pytest.raises(StateError, match="must be open"):
        run(optimizer, weight, 1)
