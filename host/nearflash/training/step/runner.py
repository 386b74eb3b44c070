"""The steps of an optimizer: from torch's gradients to a committed store and new tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from nearflash.abi.errors import CommandError, StateError
from nearflash.abi.optimizers import OptimizerStep
from nearflash.training.gradients.norm import clip_scalar, refuse_nonfinite, squares, with_gradient
from nearflash.training.gradients.scaler import LossScale
from nearflash.training.optimizers.settings import Settings
from nearflash.training.step.backward import Backward, Guess
from nearflash.training.step.plan import Plan
from nearflash.training.step.schedule import Step
from nearflash.training.step.stalls import Stalls
from nearflash.training.step.state import Master
from nearflash.training.step.timeline import Timeline
from nearflash.training.step.update import UpdateExtent

__all__ = ["Stepping"]

Rule = Callable[[Mapping[str, Any], int], OptimizerStep]
_LOSS_SCALE = "loss_scale"


class Stepping:
    """Steps of `master`'s tensors; `groups()` are the parameter groups now, `rule(group, step)` their scalars."""

    def __init__(
        self,
        master: Master,
        settings: Settings,
        timeline: Timeline,
        groups: Callable[[], Sequence[dict[str, Any]]],
        rule: Rule,
    ) -> None:
        self._master, self._settings, self._timeline = master, settings, timeline
        self._groups, self._rule = groups, rule
        self.loss_scale = LossScale.of(settings.loss_scale)
        self.extra: dict[str, Any] = {}
        """What the store was last committed with, for the training script to read and write."""
        self._take_extra()
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.squares = squares
        """Of the gradients that the norm is of: all here; doors.ranks has others too."""
        self.stalls = Stalls()
        self.attach()

    def attach(self) -> None:
        """Begin with the master's tensors as they are now."""
        overlaps = self._settings.overlap == "backward"
        self.backward = Backward(self._master.flat, self._begin_guess) if overlaps else None

    def detach(self) -> None:
        """Forget updates that backward has begun, and do not begin others."""
        if self.backward is not None:
            self.backward.close()

    def discard(self) -> None:
        """Forget updates that backward has begun."""
        if self.backward is not None:
            self.backward.discard()

    def rollback(self) -> None:
        """Be at the step before."""
        self.discard()
        self._master.rollback()
        self._take_extra()

    def step(self, grad_scale: float | None, found_inf: bool) -> None:
        """One step of all tensors that have a gradient.

        grad_scale: what the gradients were multiplied by, where a GradScaler says so; found_inf: it found overflow.
        """
        guess = self.backward.take() if self.backward is not None else None
        with ExitStack() as under_way:
            if guess is not None:
                under_way.enter_context(guess.step)
            if self._master.flat.changed():
                if guess is not None:
                    guess.step.discard()
                guess = None
                self._take_changes()
            active = with_gradient(self._master.flat)
            if active and not found_inf:
                self._advance(active, guess, grad_scale, under_way)

    def _advance(self, active: list[int], guess: Guess | None, grad_scale: float | None, under_way: ExitStack) -> None:
        """`under_way`: discards, at its end, the steps in it that have not come to theirs."""
        flat, store = self._master.flat, self._master.store
        step = self._begin(under_way) if guess is None else guess.step
        if (scalar := self._scalar(active, grad_scale)) is None:
            return
        plan = self._plan(active, scalar)
        if guess is not None and not self._judge(guess, plan):
            step.discard()
            step = self._begin(under_way)
        step.release(self._update(plan))
        step.offer(self._master.schedule.order())
        step.finish()
        self.stalls = step.stalls
        steps = list(store.tensor_steps)
        for tensor in active:
            steps[tensor] += 1
        scale = None if self.loss_scale is None else self.loss_scale.after(overflow=False)
        with self._timeline.span("commit"):
            store.commit(steps, self.extra | ({} if scale is None else {_LOSS_SCALE: scale.to_json()}))
        self.loss_scale = scale
        if self._master.compressor is not None:
            self._master.compressor.commit()
        with self._timeline.span("publish"):
            flat.publish(active)
        self._master.traffic.add(steps=1, params=plan.params)

    def _begin(self, under_way: ExitStack) -> Step:
        """A step that reads ahead, while the gradients are still looked at."""
        step = under_way.enter_context(self._start())
        step.offer(self._master.schedule.order())
        return step

    def _start(self) -> Step:
        if self._master.compressor is not None:
            self._master.compressor.abort()  # what an attempt before this one had left out
        return self._master.schedule.begin()

    def _update(self, plan: Plan) -> UpdateExtent:
        master = self._master
        return UpdateExtent(master.flat, plan, self._timeline, master.compressor, master.store.steps + 1)

    def _scalar(self, active: Sequence[int], grad_scale: float | None) -> float | None:
        """What gradients are multiplied by; None where the step is to be skipped. Raises NonFiniteError."""
        if grad_scale is not None and self.loss_scale is not None:
            raise CommandError("loss_scale must be None where a GradScaler scales the loss; leave one of them out")
        with self._timeline.span("norm"):
            total = self.squares(self._master.flat.tensors[index].grad for index in active)
        if not math.isfinite(total):
            if self.loss_scale is None:
                refuse_nonfinite(self._master.flat, active)
            else:
                self.loss_scale = self.loss_scale.after(overflow=True)
            self.skipped_steps += 1
            return None
        scale = self._scale if grad_scale is None else grad_scale
        self.grad_norm = math.sqrt(total) / scale
        return clip_scalar(math.sqrt(total), self._settings.max_grad_norm, scale)

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _plan(self, active: Sequence[int], scalar: float) -> Plan:
        master = self._master
        return Plan.of(master.flat, self._groups(), active, master.store.tensor_steps, self._rule, scalar)

    def _take_changes(self) -> None:
        if self._master.started:
            if self._master.agrees():  # a checkpoint of this very step was loaded
                self._master.flat.note_versions()
                return
            raise StateError(
                f"parameter {self._master.flat.changed()[0]!r} must be changed by this optimizer only, but others "
                f"wrote to it after step {self._master.store.steps} and the stored master would undo that; construct a "
                "new optimizer from the tensors"
            )
        self.detach()
        self._master.create_again(self._groups())
        self.attach()

    def _take_extra(self) -> None:
        self.extra = dict(self._master.store.metadata)
        if (stored := self.extra.pop(_LOSS_SCALE, None)) is not None and self.loss_scale is not None:
            self.loss_scale = self.loss_scale.resumed(stored)

    # During backward

    def _begin_guess(self) -> Guess | None:
        """With nothing clipped and all finite, every tensor that wants a gradient gets one."""
        flat = self._master.flat
        if flat.changed():
            return None
        known = {i: tensor.grad for i, tensor in enumerate(flat.tensors) if not tensor.requires_grad}
        active = [i for i, tensor in enumerate(flat.tensors) if tensor.requires_grad or known[i] is not None]
        plan = self._plan(active, clip_scalar(0.0, None, self._scale))
        guess = Guess(self._start(), plan)
        for tensor, gradient in known.items():
            if gradient is not None:
                guess.see(tensor, gradient)
        guess.step.release(self._update(plan))
        return guess

    def _judge(self, guess: Guess, plan: Plan) -> bool:
        assert self.backward is not None, "the guess is its own"
        right = guess.is_right(self._master.flat, plan)
        self.backward.judge(right=right)
        return right
