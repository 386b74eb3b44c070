"""The steps of an optimizer: from torch's gradients to a committed store and new tensors."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from nearflash.abi.errors import CommandError, NonFiniteError, StateError
from nearflash.abi.optimizers import OptimizerStep
from nearflash.storage import StateStore
from nearflash.training.gradients.scaler import LossScale
from nearflash.training.step.arrays import arrays_of, join_arrays
from nearflash.training.step.fingerprint import GradientFingerprints
from nearflash.training.step.full_state import check_full_state, load_full_state
from nearflash.training.step.norm import (
    clip_scalar,
    reject_nonfinite,
    squares_and_fingerprints,
    tensors_with_gradient,
)
from nearflash.training.step.optimizer_state import RESERVED, OptimizerState
from nearflash.training.step.plan import StepPlan
from nearflash.training.step.release import Release
from nearflash.training.step.report import Report
from nearflash.training.step.requirements import check_gradient, check_parameter, is_readable
from nearflash.training.step.schedule import Step
from nearflash.training.step.settings import StepSettings
from nearflash.training.step.speculation import SpeculativeStep, Speculator
from nearflash.training.step.worker import Worker

__all__ = ["StepRunner"]

Rule = Callable[[Mapping[str, Any], int], OptimizerStep]
_LOSS_SCALE = "loss_scale"


class StepRunner:
    """Steps of `state`'s tensors; `groups()` are the parameter groups now, `rule(group, step)` their scalars."""

    def __init__(
        self,
        state: OptimizerState,
        settings: StepSettings,
        report: Report,
        groups: Callable[[], Sequence[dict[str, Any]]],
        rule: Rule,
        worker: Worker,
    ) -> None:
        """worker: makes all calls that are not short; here, those of hooks."""
        self._state, self._settings, self._report = state, settings, report
        self._groups, self._rule, self._worker = groups, rule, worker
        self.loss_scale = LossScale.parse(settings.loss_scale)
        self._interrupted = False
        self._release = Release(state, settings)
        self.metadata: dict[str, Any] = {}
        """What the store was last committed with, for the training script to read and write."""
        self._load_metadata()
        self.without_gradient = False
        """Whether the last step found none."""
        self.speculator: Speculator | None = None
        """Begins steps during backward; None with overlap="step"."""
        self._attach()

    def _attach(self) -> None:
        if self._state.scratch is not None:
            self._state.scratch.attach(self._state.flat.tensors, self._worker)
        if self._settings.speculates:
            self.speculator = Speculator(self._state.flat, self._speculate, self._report, self._worker)

    def detach(self) -> None:
        """Forget updates that backward has begun, and do not begin others."""
        if self.speculator is not None:
            self.speculator.close()

    @property
    def released(self) -> bool:
        """Whether memory and devices are given back."""
        return self._release.released

    def release(self, *, parameters: bool, unlock: bool) -> None:
        """See Release; updates that backward has begun are discarded, and made again from `p.grad`."""
        self.detach()
        try:
            self._release.release(parameters=parameters, unlock=unlock)
        except BaseException:
            self._attach()
            raise

    def acquire(self) -> None:
        """See Release."""
        self._release.acquire()
        self._attach()

    def discard(self) -> None:
        """Forget updates that backward has begun."""
        if self.speculator is not None:
            self.speculator.discard()

    def drop_gradients(self) -> None:
        """Forget gradients that are not in memory, and updates that backward has begun."""
        self.discard()
        if self._state.scratch is not None:
            self._state.scratch.clear()

    def accumulating(self) -> AbstractContextManager[None]:
        """Gradients that come meanwhile are not final."""
        return nullcontext() if self.speculator is None else self.speculator.accumulating()

    def grow(self, also: Collection[str] = ()) -> None:
        """State for all tensors of the groups that are trained now, or are named; what was trained stays.

        Where nothing was, all begins again with the tensors as they are.
        """
        groups = self._groups()
        rules = [self._rule(group, 1) for group in groups]
        arrays = join_arrays(self._state.store.manifest.arrays, arrays_of(rules, self._settings.compression))
        if self._state.started:
            self._accept(self._state.flat.find_changed())
        self.detach()
        try:
            if self._state.started:
                self._state.grow(groups, arrays, also)
            else:
                self._state.recreate(groups, arrays, also)
        finally:
            self._attach()

    def accept_parameters(self) -> None:
        """Take the tensors' present values over; before the first step they count anyway."""
        self.discard()
        if self._state.started:
            self._state.accept()

    def load(self, given: Mapping[int, Mapping[str, Any]]) -> None:
        """Make a full state, as torch.optim has it, the next step's. Checks all, then touches."""
        state = self._state
        state.flat.check_memory()
        members = sorted((*state.flat.members, *state.flat.waiting), key=lambda member: member.number)
        check_full_state(members, state.store.manifest.arrays, given)
        self.discard()
        if also := [member.name for member in state.flat.waiting if given.get(member.number)]:
            self.grow(also)
        load_full_state(state.flat, state.store, given)
        state.reload()

    def restore(self, snapshot: StateStore) -> None:
        """Be at the step of a snapshot."""
        self.discard()
        self._state.restore(snapshot)
        self._load_metadata()

    def _find_thawed(self) -> list[str]:
        """Names of tensors that have their first gradient. Raises ShapeError, FormatError for what cannot be used."""
        members = [member for member in self._state.flat.waiting if member.tensor.grad is not None]
        for member in members:
            check_parameter(member.name, member.tensor)
            assert member.tensor.grad is not None
            check_gradient(member.name, member.tensor.grad, member.tensor.shape)
        return [member.name for member in members]

    def rollback(self) -> None:
        """Be at the step before."""
        self.discard()
        self._state.rollback()
        self._load_metadata()

    def step(self, grad_scale: float | None, found_inf: bool) -> None:
        """One step of all tensors that have a gradient.

        grad_scale: what the gradients were multiplied by, where a GradScaler did that; found_inf: it found overflow.
        """
        self._interrupted = False
        if RESERVED in self.metadata:
            raise CommandError(f"metadata must not have the key {RESERVED!r}, which is the optimizer's: rename it")
        speculative = self.speculator.claim() if self.speculator is not None else None
        with ExitStack() as in_flight:
            in_flight.push(self._undo_publishing)
            if speculative is not None:
                in_flight.enter_context(speculative.step)
            if self._state.unpublished:
                self._state.flat.check_memory()
                self._state.reload()
                self._load_metadata()
            active = tensors_with_gradient(self._state.flat)
            thawed = [] if found_inf else self._find_thawed()
            if thawed or (not self._state.started and self._state.flat.find_changed()):
                if speculative is not None:
                    speculative.step.discard()
                    speculative = None
                self.grow()
                active = tensors_with_gradient(self._state.flat)
            # Of several processes others may have gradients where this one has none.
            several = self._settings.sum_of_squares is not None
            self.without_gradient = not active and not several
            goes_on = (bool(active) or several) and not found_inf
            if not goes_on or not self._advance(active, speculative, grad_scale, in_flight):
                self._accept(self._state.flat.find_changed())
        if self._state.scratch is not None:
            self._state.scratch.clear()
            self._state.scratch.attach(self._state.flat.tensors, self._worker)

    def _advance(
        self,
        active: list[int],
        speculative: SpeculativeStep | None,
        grad_scale: float | None,
        in_flight: ExitStack,
    ) -> bool:
        """Whether there was a step, not one to be skipped; `in_flight` discards, at its end, what is not finished."""
        step = self._begin(in_flight, active) if speculative is None else speculative.step  # it reads, from here on
        with ThreadPoolExecutor(1, "contents") as pool:
            changed = pool.submit(self._state.flat.find_changed, threads=1)
            scalar, gradients = self._look_at(active, grad_scale)
            if scalar is None:
                return False
            plan = self._plan(active, scalar)
            self._accept(changed.result())
        self._state.flat.prepare(active)
        if speculative is None:
            self._finish(step, plan, active)
        elif not self._finish_speculative(speculative, plan, dict(zip(active, gradients, strict=True))):
            self._finish(self._begin(in_flight, active), plan, active)
        self._check_interrupted()
        scale = None if self.loss_scale is None else self.loss_scale.update(overflow=False)
        reserved = {} if scale is None else {RESERVED: {_LOSS_SCALE: scale.to_json()}}
        self._state.commit(active, self.metadata | reserved)
        self.loss_scale = scale
        self._report.traffic.add(steps=1, params=plan.params)
        return True

    def _undo_publishing(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._state.undo_publishing()

    def interrupt(self) -> None:
        """Have the step that is being made end without effect, unless it is being committed; from any thread."""
        self._interrupted = True
        self._state.abort_step()

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise KeyboardInterrupt

    def _begin(self, in_flight: ExitStack, active: Sequence[int]) -> Step:
        """A step that reads ahead, while the gradients are still looked at."""
        self._check_interrupted()
        step = in_flight.enter_context(self._state.begin_step())
        step.offer(self._state.extent_order(active))
        return step

    def _finish(
        self, step: Step, plan: StepPlan, active: Iterable[int], gathered: GradientFingerprints | None = None
    ) -> None:
        """All extents of tensors with a gradient read, updated by the plan, and written."""
        step.release(self._state.updater(plan, gathered))
        step.offer(self._state.extent_order(active))
        step.finish()
        self._report.stalls = step.stalls

    def _finish_speculative(self, speculative: SpeculativeStep, plan: StepPlan, gradients: Mapping[int, int]) -> bool:
        """The same with a step that backward has begun; whether it was right, else it is discarded.

        gradients: today's fingerprints, by tensor.
        """
        assert self.speculator is not None, "the speculative step is its own"
        right = speculative.validate(self._state.flat, plan)
        if right:
            try:
                self._finish(speculative.step, plan, gradients, speculative.gathered)
                right = speculative.gathered.agree(gradients)
            except NonFiniteError:  # of gradients as they were: today's are finite
                right = False
        if not right:
            speculative.step.discard()
        self.speculator.resolve(correct=right)
        return right

    def _look_at(self, active: Sequence[int], grad_scale: float | None) -> tuple[float | None, list[int]]:
        """Compute the gradients' factor, None where the step is to be skipped; their fingerprints.

        Raises NonFiniteError.
        """
        if grad_scale is not None and self.loss_scale is not None:
            raise CommandError("loss_scale must be None where a GradScaler scales the loss; leave one of them out")
        flat = self._state.flat
        with self._report.timeline.span("norm"):
            gradients = [grad for index in active if (grad := flat.tensors[index].grad) is not None]
            # Only what was gathered during backward is compared with what the gradients are now.
            scratch = self._state.scratch
            more = [] if scratch is None else scratch.squares([flat.tensors[index] for index in active])
            total, marks = squares_and_fingerprints(gradients, marked=self.speculator is not None, more=more)
            if self._settings.sum_of_squares is not None:
                total = self._settings.sum_of_squares(gradients)
        if not math.isfinite(total):
            if self.loss_scale is None:
                reject_nonfinite(flat, active)
            else:
                self.loss_scale = self.loss_scale.update(overflow=True)
            self._report.skipped_steps += 1
            return None, marks
        scale = self._scale if grad_scale is None else grad_scale
        self._report.grad_norm = math.sqrt(total) / scale
        return clip_scalar(math.sqrt(total), self._settings.max_grad_norm, scale), marks

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _plan(self, active: Sequence[int], scalar: float) -> StepPlan:
        state = self._state
        return StepPlan.of(state.flat, self._groups(), active, state.store.tensor_steps, self._make_stored_rule, scalar)

    def _make_stored_rule(self, group: Mapping[str, Any], step: int) -> OptimizerStep:
        """Raises CommandError for one whose moments are not stored."""
        rule = self._rule(group, step)
        stored = {array.name for array in self._state.store.manifest.arrays}
        if missing := [name for role, name in rule.torch_names.items() if role not in stored]:
            raise CommandError(
                f"{', '.join(missing)} must be stored from construction on, but no group had a use for it then; "
                "construct a new optimizer with these settings, on another path"
            )
        return rule

    def _accept(self, changed: Sequence[str]) -> None:
        """Raise StateError for tensors that others wrote to, unless they hold what the store does."""
        state = self._state
        if not changed:
            return
        if state.agrees():  # a checkpoint of this very step was loaded
            state.flat.note_contents()
        else:
            raise StateError(
                f"parameter {changed[0]!r} must be changed by this optimizer only, but others wrote to it after step "
                f"{state.store.steps - state.uncounted} and the stored master would undo that; call "
                "accept_parameters() after each change that is meant"
            )

    def _load_metadata(self) -> None:
        self.metadata = dict(self._state.store.metadata)
        reserved = self.metadata.pop(RESERVED, {})
        if (stored := reserved.get(_LOSS_SCALE)) is not None and self.loss_scale is not None:
            self.loss_scale = self.loss_scale.resume(stored)

    # During backward

    def _speculate(self) -> SpeculativeStep | None:
        """Assumes that nothing is clipped, all is finite, and every tensor that wants a gradient gets one."""
        flat = self._state.flat
        if flat.versions_changed() or any(member.wants_state for member in flat.waiting):
            return None
        known = {i: tensor.grad for i, tensor in enumerate(flat.tensors) if not tensor.requires_grad}
        if not all(gradient is None or is_readable(gradient) for gradient in known.values()):
            return None
        active = [i for i, tensor in enumerate(flat.tensors) if tensor.requires_grad or known[i] is not None]
        plan = self._plan(active, clip_scalar(0.0, None, self._scale))
        speculative = SpeculativeStep(self._state.begin_step(), plan)
        for tensor, gradient in known.items():
            if gradient is not None:
                speculative.record(tensor, gradient)
        flat.prepare(active)
        speculative.step.release(self._state.updater(plan, speculative.gathered, speculative.gradients))
        return speculative
