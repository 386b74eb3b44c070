"""Muon: momentum and apply beside the state, the orthogonalisation of whole matrices where they are.

    extent: g ──► device: m' = mu·m + (1 - mu)·g       (rule sgd with dampening = mu, and lr = 0)
    matrix: m', g ──► look ahead ──► Newton-Schulz ──► u, bf16                  (host, or the GPU that has the matrix)
    extent: u ──► device: p' = p - lr·ratio·(u + wd/ratio·p)                    (rule sgd without momentum)

Both device passes are the rule sgd, which every device, the gateware and the model have. When the first extent of a
matrix is updated, the committed m of all of its extents is read once more, 4 bytes a parameter in fp32; u is kept until
its last extent is done: memory is that of the matrices in flight.

Equals torch.optim.Muon but for the rounding of m' (torch takes lerp) and of the decay (torch scales p first). Source:
Jordan et al., Muon (2024); Liu et al., Muon is Scalable for LLM Training (2025); torch.optim.Muon.
"""

import math
import threading
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import OptimizerStep, Profile, SgdStep, StateFormat
from nearflash.device.backends.host.vector.lane import VectorLane
from nearflash.device.backends.host.vector.state import VectorState
from nearflash.storage import Extent, StateStore
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.training.step.parameters import FlatParameters, Gradients
from nearflash.training.step.traffic import Traffic

__all__ = ["ADJUSTMENTS", "COEFFICIENTS", "MuonStep", "Orthogonalizer", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, with the steepest slope at zero."""
ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_STEPS = 99


@dataclass(frozen=True)
class MuonStep(OptimizerStep):
    """One step of Muon as scalars. Raises CommandError for a value outside its range."""

    optimizer: ClassVar[str] = "muon"
    PROFILES: ClassVar[tuple[Profile, ...]] = SgdStep.PROFILES

    lr: float
    step: int
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    profile: Profile = Profile.IEEE
    state_format: StateFormat = StateFormat.FP32

    def __post_init__(self) -> None:
        several = len(self.coefficients) == 3 and all(map(math.isfinite, self.coefficients))
        self._check(
            {
                "momentum": (0 <= self.momentum < 1, "in [0, 1)"),
                "coefficients": (several, "three finite numbers"),
                "eps": (math.isfinite(self.eps) and self.eps > 0, "positive and finite"),
                "ns_steps": (0 <= self.ns_steps <= _MOST_STEPS, f"from 0 to {_MOST_STEPS}"),
                "adjust_lr_fn": (self.adjust_lr_fn in ADJUSTMENTS, "None, 'original' or 'match_rms_adamw'"),
            },
            ("momentum",),
        )

    @property
    def torch_names(self) -> dict[str, str]:
        """The moment shares Adam's array; `full_state_dict` gives it torch's name."""
        return {"m": "exp_avg"} if self.momentum else {}

    @property
    def moment(self) -> SgdStep:
        """First pass: m changes, and p does not. SGD's first step would take g whole: its number is one more."""
        return SgdStep(lr=0.0, step=self.step + 1, momentum=self.momentum, dampening=self.momentum,
                       profile=self.profile, state_format=self.state_format)  # fmt: skip

    def application(self, shape: tuple[int, ...]) -> SgdStep:
        """Second pass: the orthogonalised update of a matrix of that shape, and its decay, into p."""
        rows, columns = shape
        ratio = (
            0.2 * math.sqrt(max(shape)) if self.adjust_lr_fn == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
        )
        return SgdStep(lr=self.lr * ratio, step=self.step, weight_decay=self.weight_decay / ratio,
                       profile=self.profile, state_format=self.state_format)  # fmt: skip


def orthogonalize(matrix: torch.Tensor, rule: MuonStep) -> torch.Tensor:
    """U·S'·V^T of a matrix U·S·V^T, bf16, with S' about one: `ns_steps` Newton-Schulz steps, operation by operation as
    torch.optim.Muon has them."""
    a, b, c = rule.coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=rule.eps)
    for _ in range(rule.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Orthogonalizer:
    """The orthogonalised updates of one step's matrices, for the threads of its devices."""

    def __init__(self, flat: FlatParameters, store: StateStore, traffic: Traffic, given: Gradients) -> None:
        """given: gradients, by tensor, in the place of what the tensors have."""
        self._flat, self._store, self._traffic, self._given = flat, store, traffic, given
        self._lock = threading.Lock()
        self._updates: dict[int, tuple[torch.Tensor, int]] = {}
        """Of matrices in flight: u, (n,), and how many elements were not taken yet."""

    def put(self, tensor: int, rule: MuonStep, scalar: float, first: int, out: NDArray[np.float32]) -> None:
        """Write elements first, first + 1, … of a matrix's update into `out`; zero behind its end.

        scalar: what its gradient is multiplied by. Each element is asked for once. Raises StateError, CommandError.
        """
        with self._lock:
            update, left = self._updates.pop(tensor, (None, 0))
            if update is None:
                update, left = self._compute(tensor, rule, scalar), self._flat.entries[tensor].params
            part = update[first : first + out.size]
            if left > len(part):
                self._updates[tensor] = update, left - len(part)
        torch.from_numpy(out)[: len(part)].copy_(part)
        out[len(part) :] = 0

    def _compute(self, tensor: int, rule: MuonStep, scalar: float) -> torch.Tensor:
        entry, given = self._flat.entries[tensor], self._flat.tensors[tensor]
        if len(entry.shape) != 2:
            raise CommandError(
                f"parameter {entry.name!r} must be a matrix for Muon, not of shape {entry.shape}: put it into a group "
                "with use_muon=False"
            )
        gradient = np.empty(entry.stop - entry.start, np.float32)
        self._flat.put_gradients(entry.start, entry.stop, scalar, gradient, given=self._given)
        direction = torch.from_numpy(gradient)
        if rule.momentum:
            moment = self._read_moment(entry.start, entry.stop, rule)
            arrays = {"p": np.zeros_like(gradient), "m": moment}
            wide = SgdStep(
                lr=0.0, step=rule.step + 1, momentum=rule.momentum, dampening=rule.momentum, profile=rule.profile
            )
            VectorLane(wide, CopyFormat.NONE).step({"g": gradient, **arrays}, arrays)
            new = torch.from_numpy(moment)
            direction = direction.lerp(new, rule.momentum) if rule.nesterov else new
        matrix = direction[: entry.params].view(entry.shape).to(given.device)
        return orthogonalize(matrix, rule).cpu().reshape(-1)

    def _read_moment(self, start: int, stop: int, rule: MuonStep) -> NDArray[np.float32]:
        """m of [start, stop), decoded, as committed."""
        manifest = self._store.manifest
        names = [name for name in rule.arrays if name in ("m", "m_scale")]
        values = np.empty(stop - start, np.float32)
        for extent in manifest.extents[start // manifest.extent_params : -(-stop // manifest.extent_params)]:
            first, last = max(start, extent.start), min(stop, extent.stop)
            words = [self._read(name, extent, first, last) for name in names]
            out = np.empty(last - first, np.float32)
            values[first - start : last - start] = VectorState("m", rule.state_format, 0).decode(words, out)
        return values

    def _read(self, name: str, extent: Extent, first: int, last: int) -> NDArray[np.generic]:
        array = self._store.manifest.array(name)
        memory = reuse_buffer(array.extent_bytes(extent))
        self._store.read(name, extent, memory)
        self._traffic.add(flash_read_bytes=memory.nbytes)
        used = memory[array.size_bytes(first - extent.start) : array.size_bytes(last - extent.start)]
        return used.view(np.float32 if array.element_bytes == 4 else f"u{array.element_bytes}")
