"""Updates that begin while backward still runs.

An extent is offered to the schedule when the gradients of all its tensors have come. Whether they will be clipped, are
all finite, or will be changed by the training script before `step` is not known then, so this is a guess: that nothing
of the kind happens. `step` compares, and has a wrong guess discarded and done again, with the same result to the bit.
After a wrong guess some steps (1, 2, 4, … 64) are made without one.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nearflash.training.step.parameters import FlatParameters
from nearflash.training.step.plan import Plan
from nearflash.training.step.schedule import Step

__all__ = ["Backward", "Guess"]

LONGEST_PAUSE = 64
"""Steps without a guess, at most."""


class Guess:
    """A step under way whose gradients are not all known."""

    def __init__(self, step: Step, plan: Plan) -> None:
        self.step, self.plan = step, plan
        self.seen: dict[int, tuple[torch.Tensor, int]] = {}
        """Gradients, by tensor, and the version that torch counts of each."""

    def see(self, tensor: int, gradient: torch.Tensor) -> None:
        """Note a gradient as it is now."""
        self.seen[tensor] = gradient, gradient._version

    def is_right(self, flat: FlatParameters, plan: Plan) -> bool:
        """Whether all extents that were offered are updated as they are to be by `plan`, with today's gradients."""
        for extent in self.step.offered:
            for tensor in flat.tensors_in(extent.start, extent.stop):
                gradient = flat.tensors[tensor].grad
                seen, version = self.seen.get(tensor, (None, 0))
                if gradient is not seen or (gradient is not None and gradient._version != version):
                    return False
            if list(self.plan.within(extent)) != list(plan.within(extent)):
                return False
        return True


class Backward:
    """Hooks on the tensors that backward gives gradients to; `begin` makes a guess, or None where none can be made.

    The first gradient that comes begins a guess, a second one of the same tensor before `take` spoils it.
    """

    def __init__(self, flat: FlatParameters, begin: Callable[[], Guess | None]) -> None:
        self._flat, self._begin = flat, begin
        self._lock = threading.Lock()
        self._guess: Guess | None = None
        self._came: set[int] = set()
        self._ignoring = False
        self._missing: Counter[int] = Counter()
        """Gradients that have not come, by extent."""
        self._accumulating = self._pause = 0
        self._next_pause = 1
        self.wrong = 0
        """Guesses that were not right."""
        size, extents = flat.manifest.extent_params, flat.manifest.extents
        self._extents = {
            index: extents[entry.start // size : -(-(entry.start + entry.params) // size)]
            for index, (tensor, entry) in enumerate(zip(flat.tensors, flat.entries, strict=True))
            if tensor.requires_grad and entry.params
        }
        # Hooks live as long as their tensors: through a weak reference they do not keep an optimizer alive.
        me = weakref.ref(self)

        def hook(index: int) -> Callable[[torch.Tensor], None]:
            def come(_: torch.Tensor) -> None:
                if (backward := me()) is not None:
                    backward._come(index)

            return come

        self._hooks = [flat.tensors[i].register_post_accumulate_grad_hook(hook(i)) for i in self._extents]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Gradients that come meanwhile are not final."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def take(self) -> Guess | None:
        """The guess, for `step` to judge; the next gradient begins another one."""
        with self._lock:
            guess, spoiled, paused = self._guess, self._ignoring, self._pause
            self._guess, self._ignoring = None, False
            self._came.clear()
            self._pause = max(0, paused - 1)
        if guess is not None and spoiled:
            guess.step.discard()
            self.judge(right=False)
            return None
        return guess

    def judge(self, *, right: bool) -> None:
        """Whether the guess that was taken was right."""
        if right:
            self._next_pause = 1
        else:
            self.wrong += 1
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)

    def discard(self) -> None:
        """Forget the guess, and the gradients that came."""
        with self._lock:
            guess, self._guess, self._ignoring = self._guess, None, False
            self._came.clear()
        if guess is not None:
            guess.step.discard()

    def close(self) -> None:
        """Discard, and take the hooks away."""
        self.discard()
        for hook in self._hooks:
            hook.remove()

    def _come(self, tensor: int) -> None:
        with self._lock:
            if tensor in self._came:
                self._ignoring = True
                if self._guess is not None:
                    self._guess.step.abort()
            if self._ignoring or self._accumulating:
                return
            self._came.add(tensor)
            if self._guess is None and not self._start():
                self._ignoring = True
                return
            self._offer(tensor)

    def _start(self) -> bool:
        self._guess = None if self._pause else self._begin()
        self._missing = Counter(extent.index for extents in self._extents.values() for extent in extents)
        return self._guess is not None

    def _offer(self, tensor: int) -> None:
        gradient = self._flat.tensors[tensor].grad
        assert self._guess is not None and gradient is not None, "a gradient has just come"
        self._guess.see(tensor, gradient)
        for extent in self._extents[tensor]:
            self._missing[extent.index] -= 1
            if not self._missing[extent.index]:
                self._guess.step.offer([extent])
