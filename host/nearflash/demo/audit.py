"""Recomputes every step with nearflash.model and compares every word that the device has stored.

Only the gradients and the first parameters are taken from the training script; from there on the model keeps its own
p, m and v, so an error in any step stays visible in all later ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.optimizers import AdamStep
from nearflash.model.update.lane import optimizer_step
from nearflash.storage import ARRAYS, Manifest
from nearflash.training import NearStorageAdamW
from nearflash.training.step.parameters import COPY_OF

__all__ = ["Audit", "StepRecord", "relative_error"]


@dataclass(frozen=True)
class StepRecord:
    """Tensors that a step has used and stored; nothing in it changes with the next step."""

    gradients: NDArray[np.float32]
    group: dict[str, Any]
    stored: dict[str, NDArray[np.float32]]
    copies: list[NDArray[np.uint16]]
    """Words of each tensor."""


class Audit:
    """For tensors of one dtype and one parameter group, all of which get a gradient in every step."""

    def __init__(self, tensors: list[torch.Tensor], manifest: Manifest) -> None:
        self._tensors, self._manifest = tensors, manifest
        self._copy = COPY_OF[tensors[0].dtype]
        self.p = self._flat([tensor.detach() for tensor in tensors])
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.steps = 0
        self.words = 0
        """Words compared so far: p, m, v and the copy."""
        self.mismatches = 0
        """Words that differed."""
        self.torch_error = 0.0
        """Relative error of the first step against torch.optim.AdamW (see `relative_error`)."""

    def record(self, optimizer: NearStorageAdamW) -> StepRecord:
        """Copy what `check` needs of a step: call it while the tensors still have that step's gradients."""
        return StepRecord(
            gradients=self._flat([tensor.grad for tensor in self._tensors if tensor.grad is not None]),
            group=dict(optimizer.param_groups[0]),
            stored={array: optimizer.store.read_array(array)[: self.p.size] for array in ARRAYS},
            copies=[tensor.detach().view(torch.uint16).reshape(-1).numpy().copy() for tensor in self._tensors],
        )

    def check(self, record: StepRecord) -> None:
        """Compare one step; steps come in order."""
        self.steps += 1
        group, stored = record.group, record.stored
        beta1, beta2 = group["betas"]
        adam = AdamStep(group["lr"], self.steps, beta1, beta2, group["eps"], group["weight_decay"])
        new = optimizer_step(adam, record.gradients, self.p, self.m, self.v, self._copy)
        if self.steps == 1:
            self.torch_error = relative_error(stored["p"], self._torch_step(group, record.gradients), self.p)
        self.p, self.m, self.v = new.p, new.m, new.v
        for array in ARRAYS:
            self._compare(stored[array].view(np.uint32), getattr(new, array).view(np.uint32))
        if new.copy is not None:
            for entry, words in zip(self._manifest.tensors, record.copies, strict=True):
                self._compare(words, new.copy[entry.start : entry.start + entry.params])

    def check_resumed(self, optimizer: NearStorageAdamW) -> None:
        """Compare the state of a file that was opened again."""
        for array in ARRAYS:
            self._compare(
                optimizer.store.read_array(array)[: self.p.size].view(np.uint32), getattr(self, array).view(np.uint32)
            )

    def _compare(self, words: NDArray[np.generic], expected: NDArray[np.generic]) -> None:
        self.words += expected.size
        self.mismatches += int(np.count_nonzero(words != expected))

    def _flat(self, tensors: list[torch.Tensor]) -> NDArray[np.float32]:
        flat = np.zeros(self._manifest.tensors[-1].stop, np.float32)
        for entry, tensor in zip(self._manifest.tensors, tensors, strict=True):
            flat[entry.start : entry.start + entry.params] = tensor.float().reshape(-1).numpy()
        return flat

    def _torch_step(self, group: dict[str, Any], gradients: NDArray[np.float32]) -> NDArray[np.float32]:
        parameter = torch.nn.Parameter(torch.from_numpy(self.p.copy()))
        parameter.grad = torch.from_numpy(gradients)
        scalars = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        torch.optim.AdamW([parameter], **scalars).step()
        return parameter.detach().numpy()


def relative_error(p: NDArray[np.float32], p_torch: NDArray[np.float32], p_before: NDArray[np.float32]) -> float:
    """Largest (|p - p_torch| - 1 ulp of p) / |p_torch - p_before| over all elements, at least 0.

    An element that torch did not change must not be changed at all: it counts as infinite otherwise.
    """
    difference = np.abs(p.astype(np.float64) - p_torch)
    update = np.abs(p_torch.astype(np.float64) - p_before)
    if np.any(difference[update == 0]):
        return float("inf")
    moved = update > 0
    excess = np.maximum(difference[moved] - np.spacing(np.abs(p[moved])), 0.0)
    return float(np.max(excess / update[moved], initial=0.0))
