"""One case of the bench, in a process of its own: `python -m nearflash.bench.training.cases CASE --path FOLDER`.

    torch-memory             fp32 masters and moments in memory, torch's fused AdamW: the ceiling
    nearflash-host           NearStorageAdamW on device host, state in a file of FOLDER
    nearflash-host-overlap   the same, updates begin while backward runs
    nearflash-host-resident  as nearflash-host, 1 GiB of state kept in memory between steps
    nearflash-host-mx8       as nearflash-host, moments in 8 bits
    nearflash-host-split-*   as nearflash-host, master split, moments in fp32, bf16 or 8 bits
    nearflash-host-split-mx8-*  as nearflash-host-split-mx8, at the learning rate 1e-5 or 1e-6
    nearflash-host-delta     as nearflash-host-mx8, learning rate 1e-5, the device sends what changes
    nearflash-host-topk      as nearflash-host, 1 % of the gradient a step, with error feedback
    nearflash-host-all       overlap, and all of the state kept in memory between steps (2 GiB): only written

All train the same bf16 model on the same batches. Prints a Measured as JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from nearflash.abi.optimizers import StateFormat
from nearflash.bench.training.measured import MeasuredRun, beside_the_disk, measure
from nearflash.bench.training.subject import SCALARS, SIZES, batch, model
from nearflash.training import NearStorageAdamW, TopK

__all__ = ["CASES", "MAX_NORM", "RATES", "RATIO", "main"]

MAX_NORM = 100.0
"""Global norm to which every case clips: the norm is computed, but these gradients lie below it, as mostly in training.

What is begun during backward is done again in a step that clips."""
RATIO = 0.01
"""Of the gradient, with Top-K."""

DELTA_BYTES = 1 << 30
RATES = ("1e-5", "1e-6")
"""Learning rates of RL post-training: of weights at higher ones a step changes more."""
DELTA_LR = float(RATES[0])
RESIDENT_BYTES = 1 << 30
WHOLE_BYTES = 2 << 30
"""More than the state, and with it less memory than DeepSpeed takes."""


class InMemory:
    """The usual way: fp32 masters, AdamW over them, the bf16 copy made from them."""

    link_bytes = None

    def __init__(self, size: str) -> None:
        self._size, self.model = size, model(size)
        self._low = list(self.model.parameters())
        self._masters = [torch.nn.Parameter(p.detach().float()) for p in self._low]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **SCALARS)

    def gradients(self, step: int) -> float:
        """See Subject."""
        return _gradients(self.model, batch(self._size, step))

    @torch.no_grad()
    def update(self) -> None:
        """See Subject."""
        for master, low in zip(self._masters, self._low, strict=True):
            master.grad = None if low.grad is None else low.grad.float()
        torch.nn.utils.clip_grad_norm_(self._masters, MAX_NORM)
        self._optimizer.step()
        for master, low in zip(self._masters, self._low, strict=True):
            low.copy_(master)
            master.grad = low.grad = None


class NearStorage:
    """Masters and moments in a file."""

    def __init__(self, size: str, folder: Path, **options: Any) -> None:
        self._size, self.model = size, model(size)
        self.optimizer = NearStorageAdamW(
            self.model.parameters(), path=folder, param_dtype="bf16", max_grad_norm=MAX_NORM, **{**SCALARS, **options}
        )

    @property
    def link_bytes(self) -> int:
        """See Subject: what crosses the link to a device that reads and writes the flash by itself."""
        return self.optimizer.report.traffic.host_link_bytes

    def gradients(self, step: int) -> float:
        """See Subject."""
        return _gradients(self.model, batch(self._size, step))

    def update(self) -> None:
        """See Subject."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def _gradients(net: Any, ids: torch.Tensor) -> float:
    loss = net(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


@contextmanager
def _in_memory(size: str, _: Path) -> Iterator[MeasuredRun]:
    yield InMemory(size)


def _near_storage(**options: Any) -> Callable[[str, Path], AbstractContextManager[MeasuredRun]]:
    @contextmanager
    def open_case(size: str, folder: Path) -> Iterator[MeasuredRun]:
        subject = NearStorage(size, folder, **options)
        with subject.optimizer:
            yield subject

    return open_case


CASES: dict[str, Callable[[str, Path], AbstractContextManager[MeasuredRun]]] = {
    "torch-memory": _in_memory,
    "nearflash-host": _near_storage(),
    "nearflash-host-overlap": _near_storage(overlap="backward"),
    "nearflash-host-resident": _near_storage(resident_bytes=RESIDENT_BYTES),
    "nearflash-host-mx8": _near_storage(state_format="mx8"),
    **{f"nearflash-host-split-{form}": _near_storage(master="split", state_format=form) for form in StateFormat},
    **{
        f"nearflash-host-split-mx8-{lr}": _near_storage(master="split", state_format="mx8", lr=float(lr))
        for lr in RATES
    },
    "nearflash-host-delta": _near_storage(state_format="mx8", delta_bytes=DELTA_BYTES, lr=DELTA_LR),
    "nearflash-host-topk": _near_storage(compression=TopK(RATIO, warmup_steps=0)),
    "nearflash-host-all": _near_storage(overlap="backward", resident_bytes=WHOLE_BYTES),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one case."""
    arguments = parser(CASES).parse_args(argv)
    with CASES[arguments.case](arguments.size, arguments.path) as subject:
        params = sum(p.numel() for p in model(arguments.size).parameters())
        measured = measure(subject, params, arguments.steps)
        if arguments.disk:
            beside_the_disk(subject, measured, arguments.path, arguments.steps + 1, arguments.steps)
        print(json.dumps(measured.to_json()))
    return 0


def parser(cases: Sequence[str] | dict[str, Any]) -> argparse.ArgumentParser:
    """Arguments of a case's process."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("case", choices=cases)
    made.add_argument("--path", type=Path, required=True, help="folder for the state, which the caller removes")
    made.add_argument("--size", default="smollm2-135m", choices=SIZES)
    made.add_argument("--steps", type=int, default=5, help="counted, behind one that is not")
    made.add_argument("--disk", action="store_true", help="then as many steps interleaved with the disk alone")
    return made


if __name__ == "__main__":
    sys.exit(main())
