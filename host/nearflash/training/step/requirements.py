"""Requirements on a tensor whose memory is read and written by address; anything else gets a named error.

Checked at construction, and before each use: a storage may be resized, and `tensor.data` replaced, in between.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from nearflash.abi.errors import FormatError, ShapeError
from nearflash.training.step.streamed import is_streamed

__all__ = ["check_gradient", "check_parameter", "is_readable", "version_of"]

_DEVICES = ("cpu", "cuda")
_GIVE = "give the optimizer a torch.nn.Parameter that holds its values"


def check_parameter(name: str, tensor: torch.Tensor) -> None:
    """Raise FormatError, which calls it parameter `name`, for a tensor that an optimizer cannot write to in place."""
    if is_streamed(tensor):
        return
    if (wrong := _unreadable(tensor)) is None and tensor.is_inference():
        wrong = "be made outside torch.inference_mode, as its changes are not counted: clone it there"
    if wrong is None and _shares_elements(tensor):
        wrong = "have memory for each of its elements, not be expanded: use tensor.clone()"
    if wrong is not None:
        raise FormatError(f"parameter {name!r} must {wrong}")


def check_gradient(name: str, gradient: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise FormatError, ShapeError for a gradient, of parameter `name`, that cannot be read or has not that shape."""
    if gradient.layout is not torch.strided or not gradient.dtype.is_floating_point:
        raise FormatError(
            f"gradient of {name!r} must be dense and floating point, not {gradient.layout} {gradient.dtype}"
        )
    if (wrong := _unreadable(gradient)) is not None:
        raise FormatError(f"gradient of {name!r} must {wrong}")
    if tuple(gradient.shape) != tuple(shape):
        raise ShapeError(f"gradient of {name!r} must have the shape {tuple(shape)}, not {tuple(gradient.shape)}")


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory, of this process or of a GPU, as torch states."""
    return _unreadable(tensor) is None


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has counted a change; 0 for one of inference mode, where it does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _unreadable(tensor: torch.Tensor) -> str | None:
    """State what it must be, in place of what it is; None where its memory can be read."""
    if torch.nn.parameter.is_lazy(tensor):
        return "be initialised: call the model once before the optimizer is made"
    if _has_data_of_its_own_kind(tensor):
        give = "use ShardedOptimizer" if type(tensor).__name__ == "DTensor" else _GIVE
        return f"be a plain tensor, not a {type(tensor).__name__}: {give}"
    if tensor.layout is not torch.strided:
        return f"be strided, not {tensor.layout}: use tensor.to_dense()"
    if tensor.device.type not in _DEVICES:
        return f"be on {' or '.join(_DEVICES)}, not on {tensor.device}: move the model there first"
    if tensor.numel() and (tensor.data_ptr() == 0 or tensor.untyped_storage().nbytes() < _end_bytes(tensor)):
        return (
            f"have memory for its {tensor.numel()} elements, not {tensor.untyped_storage().nbytes()} bytes: resize its "
            "storage before the step"
        )
    return None


def _has_data_of_its_own_kind(tensor: torch.Tensor) -> bool:
    """Whether a subclass or a transform computes its values: DTensors, fake and wrapped tensors, those of vmap."""
    return (
        tensor.is_nested
        or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    )


def _end_bytes(tensor: torch.Tensor) -> int:
    """End of its last element in its storage."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Whether two of its elements may lie in one place."""
    if tensor.numel() < 2 or tensor.is_contiguous():
        return False
    steps = sorted((stride, length) for length, stride in zip(tensor.shape, tensor.stride(), strict=True) if length > 1)
    reached = [0]
    for stride, length in steps:
        reached.append(reached[-1] + stride * (length - 1))
    return any(stride <= before for (before, _), (stride, _) in zip(pairwise(reached), steps, strict=True))
