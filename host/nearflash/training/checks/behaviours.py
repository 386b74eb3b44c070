"""Actions of training scripts with an optimizer of torch's, on a small model.

Source: the documented behaviour of torch.optim.Optimizer and of its subclasses.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

__all__ = ["BEHAVIOURS", "Behaviour", "Factory", "ScriptRun", "behaviour"]

Factory = Callable[[Any], torch.optim.Optimizer]
"""An optimizer of parameters, or of groups of them."""
Behaviour = Callable[["ScriptRun"], None]
BEHAVIOURS: dict[str, Behaviour] = {}
"""By what they are, in words. They raise ValueError where something is not as torch has it."""


class ScriptRun:
    """A model, and the optimizer that trains it."""

    def __init__(self, factory: Factory) -> None:
        generator = torch.Generator().manual_seed(3)
        self.factory = factory
        self.tensors = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (70, 5, 33)]
        self.optimizer: torch.optim.Optimizer | None = None

    @property
    def opened(self) -> torch.optim.Optimizer:
        """The optimizer, made at its first use."""
        if self.optimizer is None:
            self.optimizer = self.factory(self.tensors)
        return self.optimizer

    def backward(self, step: int, scale: float = 1.0, without: tuple[int, ...] = ()) -> None:
        """Give the tensors, but those of these numbers, the gradients of a step."""
        generator = torch.Generator().manual_seed(100 + step)
        factors = [torch.randn(tensor.shape, generator=generator) for tensor in self.tensors]
        chosen = [index for index in range(len(self.tensors)) if index not in without]
        (torch.stack([(self.tensors[i] * factors[i]).sum() for i in chosen]).sum() * scale).backward()

    def step(self, number: int, **options: Any) -> None:
        """A whole step."""
        self.opened.zero_grad()
        self.backward(number, **options)
        self.opened.step()


def behaviour(text: str) -> Callable[[Behaviour], Behaviour]:
    """Note a function as the behaviour of that text."""

    def note(function: Behaviour) -> Behaviour:
        BEHAVIOURS[text] = function
        return function

    return note


# Steps


@behaviour("zero_grad, backward, step")
def _(run: ScriptRun) -> None:
    for number in range(4):
        run.step(number)


@behaviour("step(closure)")
def _(run: ScriptRun) -> None:
    for number in range(3):

        def closure(number: int = number) -> float:
            run.opened.zero_grad()
            run.backward(number)
            return 1.0

        if run.opened.step(closure) != 1.0:
            raise ValueError("the closure's loss is not returned")


@behaviour("several backward passes a step")
def _(run: ScriptRun) -> None:
    for number in range(3):
        run.opened.zero_grad()
        run.backward(number)
        run.backward(10 + number)
        run.opened.step()


@behaviour("parameters without a gradient")
def _(run: ScriptRun) -> None:
    for number in range(4):
        run.step(number, without=(number % 3,))


@behaviour("gradients of zeros: zero_grad(set_to_none=False)")
def _(run: ScriptRun) -> None:
    run.step(0)
    run.opened.zero_grad(set_to_none=False)
    run.opened.step()


@behaviour("frozen parameters: requires_grad_(False)")
def _(run: ScriptRun) -> None:
    run.step(0)
    run.tensors[1].requires_grad_(False)
    for number in (1, 2):
        run.step(number, without=(1,))


@behaviour("a learning-rate scheduler")
def _(run: ScriptRun) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.opened, 1, 0.5)
    for number in range(4):
        run.step(number)
        scheduler.step()


@behaviour("hooks before and after the step")
def _(run: ScriptRun) -> None:
    seen = []
    run.opened.register_step_pre_hook(lambda *_: seen.append("before"))
    run.opened.register_step_post_hook(lambda *_: seen.append("after"))
    run.step(0)
    if seen != ["before", "after"]:
        raise ValueError(f"hooks were called as {seen}")


# Gradients between backward and step


@behaviour("torch.nn.utils.clip_grad_norm_")
def _(run: ScriptRun) -> None:
    for number in range(3):
        run.opened.zero_grad()
        run.backward(number)
        torch.nn.utils.clip_grad_norm_(run.tensors, 0.5)
        run.opened.step()


@behaviour("p.grad.data.mul_ (as all_reduce writes)")
def _(run: ScriptRun) -> None:
    for number in range(3):
        run.opened.zero_grad()
        run.backward(number)
        for tensor in run.tensors:
            assert tensor.grad is not None, "it has just come"
            tensor.grad.data.mul_(0.5)
        run.opened.step()


@behaviour("p.grad = another tensor")
def _(run: ScriptRun) -> None:
    run.opened.zero_grad()
    run.backward(0)
    run.tensors[0].grad = torch.ones_like(run.tensors[0])
    run.opened.step()


class _Products(torch.nn.Module):
    """The sum of the tensors' products with factors of a step's seed."""

    def __init__(self, tensors: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(tensors)

    def forward(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + step)
        return torch.stack(
            [(tensor * torch.randn(tensor.shape, generator=generator)).sum() for tensor in self.tensors]
        ).sum()


class _Done(distributed.Work):
    """A collective of one rank: its result is what it was given."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self._future: torch.futures.Future[object] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: object = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[object]:
        return self._future


class _OneRank(distributed.ProcessGroup):
    """The process group of this process alone, without threads.

    Gloo's, when destroyed just after a backward pass, can wait for ever: it joins with Python's lock held a thread that
    needs the lock (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg] # the stub lacks this form

    def allreduce(self, tensors: Any, options: object = None) -> _Done:  # type: ignore[override]
        return _Done(tensors)

    def broadcast(self, tensors: Any, options: object = None) -> _Done:  # type: ignore[override]
        return _Done(tensors)

    def allgather(self, into: Any, tensors: Any, options: object = None) -> _Done:
        for target, tensor in zip(into, tensors, strict=True):
            target[0].copy_(tensor)
        return _Done(into)

    def getBackendName(self) -> str:
        return "one rank"


def _distribute(run: ScriptRun, **options: Any) -> None:
    """Two steps under DistributedDataParallel, a further one without it."""
    model = torch.nn.parallel.DistributedDataParallel(_Products(run.tensors), process_group=_OneRank(), **options)
    for number in range(2):
        run.opened.zero_grad()
        model(number).backward()
        run.opened.step()
    del model
    run.step(2)


@behaviour("DistributedDataParallel")
def _(run: ScriptRun) -> None:
    _distribute(run)


@behaviour("DistributedDataParallel(gradient_as_bucket_view=True)")
def _(run: ScriptRun) -> None:
    _distribute(run, gradient_as_bucket_view=True)


@behaviour("torch.amp.GradScaler, a step with overflow among others")
def _(run: ScriptRun) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for number in range(4):
        run.opened.zero_grad()
        scaler.scale(torch.tensor(1.0))
        run.backward(number, scale=float("inf") if number == 1 else scaler.get_scale())
        scaler.step(run.opened)
        scaler.update()


# Parameters


@behaviour("parameters written before the first step")
def _(run: ScriptRun) -> None:
    assert run.opened
    with torch.no_grad():
        run.tensors[0].fill_(2.0)
    run.step(0)


@behaviour("p.data written before the first step")
def _(run: ScriptRun) -> None:
    assert run.opened
    run.tensors[0].data.fill_(2.0)
    run.tensors[1].data = torch.ones(5)
    run.step(0)


@behaviour("parameters written after a step, and accept_parameters()")
def _(run: ScriptRun) -> None:
    for number in range(3):
        run.step(number)
        with torch.no_grad():
            run.tensors[0].clamp_(-0.1, 0.1)
        getattr(run.opened, "accept_parameters", lambda: None)()


@behaviour("parameters written after a step")
def _(run: ScriptRun) -> None:
    run.step(0)
    with torch.no_grad():
        run.tensors[0].clamp_(-0.1, 0.1)
    run.step(1)


@behaviour("p.data written after a step")
def _(run: ScriptRun) -> None:
    run.step(0)
    run.tensors[0].data.clamp_(-0.1, 0.1)
    run.step(1)


@behaviour("one Parameter used twice (tied)")
def _(run: ScriptRun) -> None:
    run.tensors[2] = run.tensors[0]
    run.optimizer = run.factory(run.tensors[:2])
    for number in range(3):
        run.step(number)


@behaviour("two Parameters in the same memory")
def _(run: ScriptRun) -> None:
    run.tensors[2].data = run.tensors[0].data[:33]
    run.step(0)


# Interrupts


@behaviour("an interrupt in the closure, then further steps")
def _(run: ScriptRun) -> None:
    def interrupt() -> float:
        run.backward(9)
        raise KeyboardInterrupt

    run.step(0)
    run.opened.zero_grad()
    with suppress(KeyboardInterrupt):
        run.opened.step(interrupt)
    run.step(1)


# Groups


@behaviour("groups with learning rates of their own, edited between steps")
def _(run: ScriptRun) -> None:
    run.optimizer = run.factory([{"params": run.tensors[:1], "lr": 0.05}, {"params": run.tensors[1:]}])
    for number in range(3):
        run.step(number)
        run.opened.param_groups[1]["lr"] *= 0.5


@behaviour("add_param_group before the first step")
def _(run: ScriptRun) -> None:
    run.optimizer = run.factory(run.tensors[:2])
    run.opened.add_param_group({"params": run.tensors[2:], "lr": 0.05})
    run.step(0)


@behaviour("add_param_group after a step")
def _(run: ScriptRun) -> None:
    run.optimizer = run.factory(run.tensors[:2])
    run.step(0)
    run.opened.add_param_group({"params": run.tensors[2:]})
    run.step(1)


@behaviour('group["params"] edited')
def _(run: ScriptRun) -> None:
    run.optimizer = run.factory(run.tensors[:2])
    run.opened.param_groups[0]["params"].append(run.tensors[2])
    run.step(0)


# State


@behaviour("state_dict, and load_state_dict into the same optimizer")
def _(run: ScriptRun) -> None:
    run.step(0)
    saved = copy.deepcopy(run.opened.state_dict())
    run.opened.param_groups[0]["lr"] = 0.0
    run.opened.load_state_dict(saved)
    run.step(1)


@behaviour("load_state_dict at a later step")
def _(run: ScriptRun) -> None:
    run.step(0)
    saved = copy.deepcopy(run.opened.state_dict())
    run.step(1)
    run.opened.load_state_dict(saved)
    run.step(2)


@behaviour("copy.deepcopy of the optimizer")
def _(run: ScriptRun) -> None:
    run.step(0)
    copy.deepcopy(run.opened)
