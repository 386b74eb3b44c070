"""The bench `interrupts`: training that is interrupted at every line, at any time, and around the commit.

A small optimizer trains; a step, its backward pass or `close` is interrupted. Then the store must be at the step before
or at the next one, the tensors at the same one, and the steps after it must be those of a run that nobody interrupted,
to the bit.
"""

import contextlib
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import torch

import nearflash.storage
import nearflash.training
from nearflash.abi.errors import NearflashError
from nearflash.bench.options import Option
from nearflash.training import NearStorageAdamW

__all__ = ["run"]

SIZES = (3000, 10, 2048)
STEPS = 60
"""Of a run; then the next one begins."""
CLOSE_EVERY = 10
TRACED = tuple(str(Path(module.__path__[0])) for module in (nearflash.training, nearflash.storage))
KINDS = ("line", "timer", "SIGTERM", "commit", "publish")

Trace = Callable[[FrameType, str, Any], Any]


class _Interrupted(BaseException):
    """Raised by a handler of SIGTERM in a training script."""


def run(
    interrupts: Annotated[int, Option("Interrupt so often, at least.", int, metavar="N")] = 2400,
) -> Iterator[dict[str, Any]]:
    """One row: interrupts by kind and phase, and disagreements, which go to standard error."""
    rng, counts, bad = random.Random(1), dict.fromkeys(KINDS, 0), list[str]()
    phases = dict.fromkeys(("backward", "step", "close"), 0)
    with tempfile.TemporaryDirectory(prefix="nearflash-interrupts-") as folder:
        expected = _run_undisturbed(Path(folder) / "whole")
        number = 0
        while sum(counts.values()) < interrupts and number < interrupts:
            overlap = "backward" if number % 2 else "step"
            campaign = _Campaign(Path(folder) / str(number), overlap, expected, rng, counts, phases)
            bad += [f"run {number} (overlap={overlap!r}): {wrong}" for wrong in campaign.run()]
            number += 1
    for wrong in bad[:100]:
        print(wrong, file=sys.stderr)
    total = sum(counts.values())
    yield {"interrupts": total, "by_kind": counts, "by_phase": phases, "runs": number, "disagreements": len(bad)}


class _Campaign:
    """One run of STEPS steps, interrupted at about each of them."""

    def __init__(
        self,
        path: Path,
        overlap: str,
        expected: list[list[torch.Tensor]],
        rng: random.Random,
        counts: dict[str, int],
        phases: dict[str, int],
    ) -> None:
        self._path, self._overlap, self._expected, self._rng = path, overlap, expected, rng
        self._counts, self._phases = counts, phases
        self._lines = {"backward": 40, "step": 400, "close": 60}
        """How many lines a phase has, as seen so far."""
        self._tensors = _tensors()
        self._optimizer = self._open()

    def run(self) -> list[str]:
        """Run it; yields what was wrong, and ends with the first such thing."""
        wrong = None
        while wrong is None and self._optimizer.steps < STEPS:
            closing = self._rng.randrange(CLOSE_EVERY) == 0
            try:
                wrong = self._close() if closing else self._train()
            except NearflashError as error:
                wrong = f"after an interrupt at step {self._optimizer.steps}: {error}"
        self._optimizer.close()
        self._path.unlink(missing_ok=True)
        return [] if wrong is None else [wrong]

    def _open(self) -> NearStorageAdamW:
        return _open(self._tensors, self._path, self._overlap)

    def _train(self) -> str | None:
        """A step, interrupted in one of its phases, and then the next step, which is not."""
        phase, kind = self._rng.choice([("backward", "line"), *(("step", kind) for kind in KINDS)])
        before = self._optimizer.steps
        self._optimizer.zero_grad()
        self._interrupt(
            "backward", kind if phase == "backward" else None, lambda: _backward(self._optimizer, self._tensors, before)
        )
        if phase == "step":
            self._interrupt(phase, kind, self._optimizer.step)
        if self._optimizer.steps not in (before, before + 1):
            return f"{kind} in {phase} of step {before}: store at step {self._optimizer.steps}"
        if wrong := self._compare(f"{kind} in {phase} of step {before}"):
            return wrong
        self._optimizer.zero_grad()
        _backward(self._optimizer, self._tensors, self._optimizer.steps)
        self._optimizer.step()
        return self._compare(f"the step after {kind} in {phase} of step {before}")

    def _close(self) -> str | None:
        before = self._optimizer.steps
        self._interrupt("close", self._rng.choice(["line", "timer", "SIGTERM"]), self._optimizer.close)
        self._optimizer.close()
        self._tensors = _tensors()
        self._optimizer = self._open()
        return None if self._optimizer.steps == before else f"close at step {before}: {self._optimizer.steps}"

    def _compare(self, what: str) -> str | None:
        """Tensors and store, with the undisturbed run at the store's step."""
        expected = self._expected[self._optimizer.steps]
        stored = torch.from_numpy(self._optimizer.store.read_array("p"))
        entries = self._optimizer.store.manifest.tensors
        for tensor, entry, value in zip(self._tensors, entries, expected, strict=True):
            if not torch.equal(stored[entry.start : entry.start + entry.params], value):
                return f"{what}: the store is not at its step {self._optimizer.steps}"
            if not torch.equal(tensor.detach(), value):
                return f"{what}: {entry.name} is not at the store's step {self._optimizer.steps}"
        return None

    def _interrupt(self, phase: str, kind: str | None, action: Callable[[], Any]) -> None:
        """Interrupt the action, if a kind is given; it may end before that, or not begin."""
        try:
            with self._how(phase, kind) if kind else contextlib.nullcontext():
                action()
        except (KeyboardInterrupt, _Interrupted):
            assert kind, "somebody else's"
            self._counts[kind] += 1
            self._phases[phase] += 1

    def _how(self, phase: str, kind: str) -> contextlib.AbstractContextManager[None]:
        if kind == "line":
            return self._at_line(phase)
        if kind in ("commit", "publish"):
            state = self._optimizer._optimizer_state
            owner = state.store if kind == "commit" else state.flat
            return _around(owner, kind, after=self._rng.random() < 0.5)
        return _after(self._rng.uniform(0, 0.006), terminate=kind == "SIGTERM")

    @contextlib.contextmanager
    def _at_line(self, phase: str) -> Iterator[None]:
        wanted, seen = self._rng.randrange(self._lines[phase]), 0

        def trace(frame: FrameType, event: str, _: Any) -> Trace | None:
            nonlocal seen
            if not frame.f_code.co_filename.startswith(TRACED):
                return None
            if event == "line":
                seen += 1
                if seen == wanted + 1:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)
            if seen <= wanted:  # the phase is shorter than was thought
                self._lines[phase] = max(seen, 1)
            else:
                self._lines[phase] = max(self._lines[phase], wanted + 10)


@contextlib.contextmanager
def _after(delay_s: float, *, terminate: bool) -> Iterator[None]:
    """A signal after some time, whose handler raises as long as the block is not left."""
    inside = True

    def handler(*_: object) -> None:
        if inside:
            raise _Interrupted if terminate else KeyboardInterrupt

    number = signal.SIGTERM if terminate else signal.SIGINT
    before = signal.signal(number, handler)
    timer = threading.Timer(delay_s, _kill, [number])
    timer.start()
    try:
        yield
    finally:
        inside = False
        timer.cancel()
        timer.join()
        signal.signal(number, before)


@contextlib.contextmanager
def _around(owner: object, name: str, *, after: bool) -> Iterator[None]:
    """SIGINT for the main thread, from the one that commits, before or after a call."""
    real = getattr(owner, name)

    def interrupting(*args: Any) -> None:
        if not after:
            _kill(signal.SIGINT)
        real(*args)
        if after:
            _kill(signal.SIGINT)

    setattr(owner, name, interrupting)
    try:
        yield
    finally:
        delattr(owner, name)


def _kill(number: int) -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _run_undisturbed(path: Path) -> list[list[torch.Tensor]]:
    """The tensors after each step."""
    tensors = _tensors()
    states = [[tensor.detach().clone() for tensor in tensors]]
    with _open(tensors, path, "step") as optimizer:
        for step in range(STEPS + 2):
            optimizer.zero_grad()
            _backward(optimizer, tensors, step)
            optimizer.step()
            states.append([tensor.detach().clone() for tensor in tensors])
    path.unlink()
    return states


def _open(tensors: list[torch.nn.Parameter], path: Path, overlap: str) -> NearStorageAdamW:
    return NearStorageAdamW(
        tensors,
        path=path,
        lr=0.1,
        resume="auto",
        overlap="backward" if overlap == "backward" else "step",
        loss_scale="dynamic",
        extent_params=1024,
    )


def _tensors() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in SIZES]


def _backward(optimizer: NearStorageAdamW, tensors: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(50 + step)
    factors = [torch.randn(tensor.numel(), generator=generator) for tensor in tensors]
    loss = torch.stack([(tensor * factor).sum() for tensor, factor in zip(tensors, factors, strict=True)]).sum()
    optimizer.scale_loss(loss).backward()
