"""Updates that begin while backward still runs.

An extent is offered to the schedule when the gradients of all its tensors have come. Whether they will be clipped, are
all finite, or will be changed by the training script before `step` is not known then: a *speculative step* assumes that
nothing of the kind happens. `step` validates it; after a misprediction it is discarded and done again, with the same
result to the bit, and the next 1, 2, 4, … 64 steps begin without speculation. Gradients that change without a new
version, as by `dist.all_reduce(p.grad)`, are told by their fingerprints, of what was gathered and what the norm saw.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils.hooks import RemovableHandle

from nearflash.abi.errors import NearflashError
from nearflash.storage import Extent
from nearflash.training.step.fingerprint import GradientFingerprints
from nearflash.training.step.parameters import FlatParameters
from nearflash.training.step.plan import StepPlan
from nearflash.training.step.report import Report
from nearflash.training.step.requirements import is_readable, version_of
from nearflash.training.step.schedule import Step
from nearflash.training.step.worker import Worker

__all__ = ["SpeculativeStep", "Speculator"]

LONGEST_PAUSE = 64
"""Steps without speculation, at most."""


class SpeculativeStep:
    """A step in flight whose gradients are not all known."""

    def __init__(self, step: Step, plan: StepPlan) -> None:
        self.step, self.plan = step, plan
        self.seen: dict[int, tuple[torch.Tensor, int]] = {}
        """Gradients, by tensor, and the version that torch counts of each."""
        self.gradients: dict[int, torch.Tensor] = {}
        """The same, for threads to read while the training script may take them away or give them other data: torch
        ends in a segmentation fault where one thread reads `p.grad` and another sets it to None."""
        self.gathered = GradientFingerprints()

    def record(self, tensor: int, gradient: torch.Tensor) -> None:
        """Note a gradient as it is now."""
        self.seen[tensor] = gradient, version_of(gradient)
        self.gradients[tensor] = gradient.detach()

    def validate(self, flat: FlatParameters, plan: StepPlan) -> bool:
        """Whether all extents that were offered are updated as `plan` demands, with today's gradients.

        As far as torch counts versions: when all is gathered, `gathered` tells the rest.
        """
        for extent in self.step.offered:
            for tensor in flat.tensors_in(extent.start, extent.stop):
                gradient = flat.tensors[tensor].grad
                seen, version = self.seen.get(tensor, (None, 0))
                if gradient is not seen or (gradient is not None and version_of(gradient) != version):
                    return False
            if list(self.plan.within(extent)) != list(plan.within(extent)):
                return False
        return True


class Speculator:
    """Hooks on the tensors that backward gives gradients to; `begin` begins a speculative step, or gives None.

    The first gradient begins one; a second gradient of the same tensor before `claim` makes it a misprediction. Hooks
    leave their work to `worker`, which makes all calls but `accumulating`: an interrupt of backward disturbs none.
    """

    def __init__(
        self, flat: FlatParameters, begin: Callable[[], SpeculativeStep | None], report: Report, worker: Worker
    ) -> None:
        self._flat, self._begin, self._report = flat, begin, report
        self._speculative: SpeculativeStep | None = None
        self._arrived: set[int] = set()
        self._ignoring = False
        self._missing: Counter[int] = Counter()
        """Gradients that have not come, by extent."""
        self._accumulating = self._pause = 0
        self._next_pause = 1
        self._worker = worker
        self._extents: dict[int, list[Extent]] = {}
        """Of each tensor that this backward pass gives a gradient to."""
        self._hooks: dict[int, RemovableHandle] = {}
        self._attach()

    def _attach(self) -> None:
        """Hooks on tensors that want a gradient by now; torch takes none of a frozen one."""
        # Hooks live as long as their tensors: through a weak reference they do not keep an optimizer alive.
        me = weakref.ref(self)

        def hook(index: int) -> Callable[[torch.Tensor], None]:
            def arrive(given: torch.Tensor) -> None:
                if (speculator := me()) is not None:
                    final, gradient = not speculator._accumulating, given.grad
                    speculator._worker.later(lambda: speculator._on_gradient(index, gradient, final=final))

            return arrive

        for index, tensor in enumerate(self._flat.tensors):
            if tensor.requires_grad and index not in self._hooks:
                self._hooks[index] = tensor.register_post_accumulate_grad_hook(hook(index))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients that come meanwhile are not final."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def claim(self) -> SpeculativeStep | None:
        """The speculative step, for `step` to validate and `resolve`; the next gradient begins another one."""
        self._attach()
        claimed, spoiled = self._speculative, self._ignoring
        self._speculative, self._ignoring = None, False
        self._arrived.clear()
        self._pause = max(0, self._pause - 1)
        if claimed is not None and spoiled:
            claimed.step.discard()
            self.resolve(correct=False)
            return None
        return claimed

    def resolve(self, *, correct: bool) -> None:
        """Whether the step that was claimed was valid: sets the pause before the next one."""
        if correct:
            self._next_pause = 1
        else:
            self._report.mispredictions += 1
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)

    def discard(self) -> None:
        """Forget the speculative step, and the gradients that came."""
        speculative, self._speculative, self._ignoring = self._speculative, None, False
        self._arrived.clear()
        if speculative is not None:
            speculative.step.discard()

    def close(self) -> None:
        """Discard, and take the hooks away."""
        self.discard()
        for hook in self._hooks.values():
            hook.remove()

    def _on_gradient(self, tensor: int, gradient: torch.Tensor | None, *, final: bool) -> None:
        if tensor in self._arrived:
            self._ignoring = True
            if self._speculative is not None:
                self._speculative.step.abort()
        if self._ignoring or not final:
            return
        self._arrived.add(tensor)
        if self._speculative is None and not self._start():
            self._ignoring = True
            return
        self._offer(tensor, gradient)

    def _start(self) -> bool:
        try:
            self._speculative = None if self._pause else self._begin()
        except (NearflashError, OSError, RuntimeError):  # which `step` will meet, and raise
            self._speculative = None
        flat = self._flat
        self._extents = {index: flat.extents_of([index]) for index, tensor in enumerate(flat.tensors)
                         if tensor.requires_grad}  # fmt: skip
        self._missing = Counter(extent.index for extents in self._extents.values() for extent in extents)
        return self._speculative is not None

    def _offer(self, tensor: int, gradient: torch.Tensor | None) -> None:
        assert self._speculative is not None, "it was begun"
        if gradient is None or not is_readable(gradient):  # taken away by another hook, or what `step` will refuse
            return
        self._speculative.record(tensor, gradient)
        for extent in self._extents.get(tensor, ()):
            self._missing[extent.index] -= 1
            if not self._missing[extent.index]:
                self._speculative.step.offer([extent])
