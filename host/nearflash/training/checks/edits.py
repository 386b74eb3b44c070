"""Public attributes of an optimizer of torch's as training scripts use them: edited, saved, loaded back."""

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from nearflash.training.checks.behaviours import ScriptRun, behaviour

__all__: list[str] = []


def _edit(text: str, edit: Callable[[ScriptRun], Any]) -> None:
    """Two steps, an edit, two steps."""

    def act(run: ScriptRun) -> None:
        for number in range(2):
            run.step(number)
        edit(run)
        for number in range(2, 4):
            run.step(number)

    behaviour(text)(act)


def _edit_group(**values: Any) -> Callable[[ScriptRun], None]:
    def edit(run: ScriptRun) -> None:
        for group in run.opened.param_groups:
            group.update({name: value for name, value in values.items() if name in group})

    return edit


def _set(run: ScriptRun, name: str, value: Any) -> None:
    run.opened.state[run.tensors[0]][name] = value


_edit("optimizer.state.clear()", lambda run: run.opened.state.clear())
_edit("optimizer.state.pop(parameter)", lambda run: run.opened.state.pop(run.tensors[0]))
_edit("optimizer.state = {}", lambda run: setattr(run.opened, "state", defaultdict(dict)))
_edit('state[p]["exp_avg"] = zeros', lambda run: _set(run, "exp_avg", torch.zeros(70)))
_edit('state[p]["step"] = 0', lambda run: _set(run, "step", torch.tensor(0.0)))
_edit("param_groups: lr", _edit_group(lr=0.03))
_edit("param_groups: lr, a tensor", _edit_group(lr=torch.tensor(0.03)))
_edit("param_groups: betas", _edit_group(betas=(0.5, 0.6)))
_edit("param_groups: betas, a list", _edit_group(betas=[0.5, 0.6]))
_edit("param_groups: eps", _edit_group(eps=1e-3))
_edit("param_groups: weight_decay", _edit_group(weight_decay=0.3))
_edit("param_groups: maximize", _edit_group(maximize=True))
_edit("param_groups: lr removed", lambda run: _expect_error(run, lambda: run.opened.param_groups[0].pop("lr")))
_edit(
    "param_groups: a group replaced by a copy",
    lambda run: run.opened.param_groups.__setitem__(0, dict(run.opened.param_groups[0])),
)
_edit(
    'group["params"] replaced by an equal list',
    lambda run: run.opened.param_groups[0].update(params=list(run.tensors)),
)
_edit("param_groups: the last parameter removed", lambda run: run.opened.param_groups[0]["params"].pop())
_edit("param_groups.clear()", lambda run: run.opened.param_groups.clear())
_edit("optimizer.defaults edited", lambda run: run.opened.defaults.update(lr=5.0))


def _expect_error(run: ScriptRun, edit: Callable[[], Any]) -> None:
    """The next step is an error; then all is as before."""
    saved = dict(run.opened.param_groups[0])
    edit()
    run.backward(7)
    try:
        run.opened.step()
    except (KeyError, ValueError):
        run.opened.param_groups[0].update(saved)
    else:
        raise ValueError("the step did not notice")


@behaviour("param_groups: a group appended by hand")
def _(run: ScriptRun) -> None:
    run.optimizer = run.factory(run.tensors[:2])
    run.step(0)
    run.opened.param_groups.append({**run.opened.param_groups[0], "params": run.tensors[2:]})
    run.step(1)


@behaviour("defaults edited, then add_param_group")
def _(run: ScriptRun) -> None:
    run.optimizer = run.factory(run.tensors[:2])
    run.step(0)
    run.opened.defaults["lr"] = 0.5
    run.opened.add_param_group({"params": run.tensors[2:]})
    run.step(1)


@behaviour("frozen parameters that are thawed")
def _(run: ScriptRun) -> None:
    run.tensors[1].requires_grad_(False)
    assert run.opened
    for number in range(2):
        run.step(number, without=(1,))
    run.tensors[1].requires_grad_(True)
    for number in range(2, 4):
        run.step(number)


@behaviour("a closure that raises, then further steps")
def _(run: ScriptRun) -> None:
    def failing() -> float:
        run.backward(9)
        raise ZeroDivisionError

    run.step(0)
    try:
        run.opened.step(failing)
    except ZeroDivisionError:
        run.step(1)


# Saved and loaded


@behaviour("state_dict through torch.save and torch.load")
def _(run: ScriptRun) -> None:
    run.step(0)
    file = io.BytesIO()
    torch.save(run.opened.state_dict(), file)
    run.opened.param_groups[0]["lr"] = 0.0
    file.seek(0)
    run.opened.load_state_dict(torch.load(file, weights_only=True))
    run.step(1)


@behaviour("hooks before and after state_dict and load_state_dict")
def _(run: ScriptRun) -> None:
    seen: list[str] = []

    def half(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append("load pre")
        if not given["state"]:
            raise ValueError("the hook does not see the state")
        groups = [{**group, "lr": group["lr"] / 2} for group in given["param_groups"]]
        return {**given, "param_groups": groups}

    run.step(0)
    run.opened.register_state_dict_pre_hook(lambda _: seen.append("pre"))
    run.opened.register_state_dict_post_hook(lambda *_: seen.append("post"))
    run.opened.register_load_state_dict_pre_hook(half)
    run.opened.register_load_state_dict_post_hook(lambda _: seen.append("load post"))
    run.opened.load_state_dict(copy.deepcopy(run.opened.state_dict()))
    if seen != ["pre", "post", "load pre", "load post"]:
        raise ValueError(f"hooks were called as {seen}")
    run.step(1)


@behaviour("load_state_dict with other groups")
def _(run: ScriptRun) -> None:
    run.step(0)
    saved = copy.deepcopy(run.opened.state_dict())
    saved["param_groups"] *= 2
    try:
        run.opened.load_state_dict(saved)
    except (ValueError, OSError):  # OSError: StateError is one
        run.step(1)


def _whole(run: ScriptRun) -> tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Any]]:
    """How the optimizer gives its whole state as torch has it, and takes it."""
    optimizer: Any = run.opened
    return getattr(optimizer, "full_state_dict", optimizer.state_dict), getattr(
        optimizer, "load_full_state_dict", optimizer.load_state_dict
    )


@behaviour("the whole state, saved and loaded at a later step")
def _(run: ScriptRun) -> None:
    run.step(0)
    save, load = _whole(run)
    saved = copy.deepcopy(save())
    run.step(1)
    load(saved)
    run.step(2)


@behaviour("the whole state with an empty `state`: moments begin again")
def _(run: ScriptRun) -> None:
    for number in range(2):
        run.step(number)
    save, load = _whole(run)
    load(save() | {"state": {}})
    run.step(2)


@behaviour("the whole state under another default dtype, after 259 steps")
def _(run: ScriptRun) -> None:
    run.step(0)
    save, load = _whole(run)
    saved = copy.deepcopy(save())
    counted = [state for state in saved["state"].values() if "step" in state]
    for state in counted:
        state["step"] = torch.tensor(259.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        load(saved)
        steps = [float(state["step"]) for state in copy.deepcopy(save())["state"].values() if "step" in state]
        load(save())
    finally:
        torch.set_default_dtype(torch.float32)
    if counted and steps != [259.0] * len(steps):
        raise ValueError(f"step counts became {steps}")
    run.step(1)


@behaviour("bf16 as default dtype at construction and in steps")
def _(run: ScriptRun) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        for number in range(3):
            run.step(number)
    finally:
        torch.set_default_dtype(torch.float32)


class _Module(torch.nn.Module):
    def __init__(self, tensors: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(tensors)


def _checkpoint(run: ScriptRun, **options: Any) -> None:
    model, chosen = _Module(run.tensors), StateDictOptions(**options)
    for number in range(4):
        run.step(number)
        saved = copy.deepcopy(get_optimizer_state_dict(model, run.opened, options=chosen))
        run.opened.param_groups[0]["lr"] = 7.0
        set_optimizer_state_dict(model, run.opened, saved, options=chosen)
    if getattr(run.opened, "steps", 4) != 4:
        raise ValueError("asking for the state counted as a step")


@behaviour("torch.distributed.checkpoint: get and set after each step")
def _(run: ScriptRun) -> None:
    _checkpoint(run)


@behaviour("torch.distributed.checkpoint, flattened")
def _(run: ScriptRun) -> None:
    _checkpoint(run, flatten_optimizer_state_dict=True)


# Schedulers with their state

_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4], 0.1),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


def _schedule(run: ScriptRun, make: Callable[[torch.optim.Optimizer], Any]) -> None:
    scheduler = make(run.opened)
    arguments = (1.0,) if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else ()
    for number in range(3):
        run.step(number)
        scheduler.step(*arguments)
    saved, rates = copy.deepcopy(scheduler.state_dict()), [group["lr"] for group in run.opened.param_groups]
    scheduler = make(run.opened)
    scheduler.load_state_dict(saved)
    for group, rate in zip(run.opened.param_groups, rates, strict=True):
        group["lr"] = rate
    for number in range(3, 6):
        run.step(number)
        scheduler.step(*arguments)


for _name, _make in _SCHEDULERS.items():
    behaviour(f"{_name} with its state, saved and loaded")(lambda run, make=_make: _schedule(run, make))  # type: ignore[misc]
