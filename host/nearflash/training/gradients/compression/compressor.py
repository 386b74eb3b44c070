"""The compressor: gradients of a range of parameters to a Top-K stream, with what it leaves out carried over.

    a = g + e,  kept = the k of a with the largest magnitude,  e' = a - kept (as rounded to the value format)

e is held in the gradients' own unit: unscaled and clipped. It changes only at `commit`: a step that is skipped or fails
leaves it as it was.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import AlignmentError, NonFiniteError
from nearflash.device.backends.host.topk import decode_values, encode_values, pack
from nearflash.training.gradients.compression.loops import compress_range
from nearflash.training.gradients.compression.residual import BLOCK_PARAMS, ExactResidual, QuantizedResidual, Residual
from nearflash.training.gradients.compression.topk import TopK

__all__ = ["Compressor"]

_INFINITY = 0x7F800000
_Compressed = tuple[NDArray[np.uint8], tuple[torch.Tensor, ...]]
"""A stream, and what it leaves out, as the residual holds it."""


class Compressor:
    """Compresses the gradients of a flat vector of `params` parameters, range by range.

    settings: what is kept. params: a multiple of 16. device: where gradients come from and the residual lies.
    Ranges that do not overlap may be compressed in any order and from any thread; a range is a unit of selection, so
    the same ranges give the same streams, whatever device or thread works on them.

    Raises AlignmentError for a number of parameters, or a range, that is not a multiple of 16.
    """

    def __init__(self, settings: TopK, params: int, device: torch.device | str = "cpu") -> None:
        _check_multiple("params", params)
        self.settings, self._params = settings, params
        self._residual: Residual | None = None
        if settings.feedback:
            kind = ExactResidual if settings.residual == "fp32" else QuantizedResidual
            self._residual = kind(params, torch.device(device))
        self._pending: dict[int, tuple[torch.Tensor, ...]] = {}

    @torch.no_grad()
    def compress(self, start: int, gradients: NDArray[np.float32] | torch.Tensor, step: int) -> NDArray[np.uint8]:
        """Stream (nearflash.abi.topk) for parameters [start, start + n), from their fp32 gradients (n,), at `step`.

        The n·ratio largest by magnitude of gradient plus residual are kept, the lower index where two are equal, and
        none that are zero. Values past the value format's range are kept as its largest number.
        Raises NonFiniteError for NaN or infinity; nothing was kept then.
        """
        given = torch.from_numpy(gradients) if isinstance(gradients, np.ndarray) else gradients.detach().reshape(-1)
        _check_multiple("start", start)
        _check_multiple("gradients", given.numel())
        params = given.numel()
        given = given.float()
        count = self.settings.count(params, step)
        stream, left = (self._compress_compiled if self._is_compiled(given) else self._compress)(start, given, count)
        if self._residual is not None:
            self._pending[start] = left
        return stream

    def _is_compiled(self, given: torch.Tensor) -> bool:
        """Whether gradients and the residual lie where the compiled passes take them."""
        held = [] if self._residual is None else self._residual.slices(0, BLOCK_PARAMS)
        return all(tensor.is_cpu and tensor.is_contiguous() for tensor in (given, *held))

    def _compress_compiled(self, start: int, given: torch.Tensor, count: int) -> _Compressed:
        held = [] if self._residual is None else self._residual.slices(start, given.numel())
        arrays = [tensor.numpy() for tensor in held]
        stream, left, wrong = compress_range(given.numpy(), count, self.settings.wire_format, arrays)
        _reject_nonfinite(wrong)
        return stream, tuple(map(torch.from_numpy, left))

    def _compress(self, start: int, given: torch.Tensor, count: int) -> _Compressed:
        total = given if self._residual is None else self._residual.add(start, given)
        chosen = _largest(total, count)
        bits = encode_values(total[chosen].cpu().numpy(), self.settings.wire_format)
        left: tuple[torch.Tensor, ...] = ()
        if self._residual is not None:
            kept = torch.from_numpy(decode_values(bits, self.settings.wire_format))
            total[chosen] -= kept.to(total.device)
            left = self._residual.pack(total)
        return pack(chosen.cpu().numpy(), bits, given.numel(), self.settings.wire_format), left

    def commit(self) -> None:
        """The step is done: what its streams left out is carried over."""
        for start, packed in self._pending.items():
            assert self._residual is not None
            self._residual.write(start, packed)
        self._pending.clear()

    def abort(self) -> None:
        """The step is not done: the residual stays as it was before it."""
        self._pending.clear()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The residual as of the last commit, by name: for the state, so that training resumes bit by bit."""
        return {} if self._residual is None else self._residual.arrays()

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `arrays` gave, or begin with nothing left out, where that is not saved.

        Raises StateError for another kind or number of parameters.
        """
        self._pending.clear()
        if self._residual is not None:
            if not self.settings.saved:
                arrays = {name: np.zeros_like(array) for name, array in self.arrays().items()}
            self._residual.load(arrays)

    def after(self, start: int, params: int, ranges: Iterable[int]) -> dict[str, NDArray[Any]]:
        """Copy what `arrays` will have of [start, start + params) after a commit: copies, on the CPU.

        ranges: starts of those that `compress` was called with in there. Nothing where it is not saved.
        """
        if self._residual is None or not self.settings.saved:
            return {}
        pending = {first: self._pending[first] for first in ranges if first in self._pending}
        return self._residual.after(start, params, pending)


def _check_multiple(name: str, params: int) -> None:
    if params % BLOCK_PARAMS:
        raise AlignmentError(f"{name} must be a multiple of {BLOCK_PARAMS} parameters, not {params}; pad with zeros")


def _reject_nonfinite(wrong: int) -> None:
    if wrong:
        raise NonFiniteError(f"gradients must be finite, not NaN or infinite in {wrong} elements; skip this step")


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices of the `count` values of largest magnitude, zeros left out, the lower index of equal ones."""
    magnitude = values.abs().view(torch.int32)  # in the order of the magnitudes, as integers; NaN above all
    least = max(int(torch.topk(magnitude, count, sorted=False).values.min()), 1)
    chosen = (magnitude >= least).nonzero().view(-1)
    kept = magnitude[chosen].cpu().numpy()
    return chosen[torch.from_numpy(_select(kept, count)).to(chosen.device)]


def _select(magnitudes: NDArray[np.int32], count: int) -> NDArray[np.bool_]:
    """Which of these, in order and with all of the largest `count`, are those. Raises NonFiniteError."""
    _reject_nonfinite(int((magnitudes >= _INFINITY).sum()))
    if magnitudes.size <= count:
        return np.ones(magnitudes.size, np.bool_)
    least = np.partition(magnitudes, -count)[-count]  # a hundred times as fast as torch's on the CPU
    chosen: NDArray[np.bool_] = magnitudes >= least
    surplus = int(chosen.sum()) - count
    if surplus:
        chosen[np.flatnonzero(magnitudes == least)[-surplus:]] = False
    return chosen
