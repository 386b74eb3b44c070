"""A model's decoder layers, and their matrices: of linear layers, and of experts."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from nearflash.abi.errors import UnsupportedError

__all__ = ["LayerMatrix", "decoder_layers", "layer_matrices", "layers_with_matrices"]

_TRANSPOSED = "is_transposed"
"""What transformers' modules of experts state."""
_FUSED_DIMENSIONS = 3


def decoder_layers(model: Any) -> tuple[str, list[nn.Module]]:
    """Name and modules of the list of decoder layers: the one as long as the configuration says, of most parameters.

    Raises UnsupportedError where there is none.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [
        (name, module) for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]  # fmt: skip
    if not lists:
        raise UnsupportedError(f"model must have a list of {count} layers, but {model.config.model_type!r} has none")
    name, layers = max(lists, key=lambda named: sum(parameter.numel() for parameter in named[1].parameters()))
    return name, list(layers)


def layers_with_matrices(model: Any) -> list[nn.Module]:
    """The decoder layers of a model, in order. Raises UnsupportedError where they have no matrices."""
    _, layers = decoder_layers(model)
    if len({id(layer) for layer in layers}) < len(layers):
        raise UnsupportedError(f"decoder layers must be modules of their own: {type(model).__name__} uses one twice")
    if not any(layer_matrices(model, layer) for layer in layers):
        raise UnsupportedError(f"model must have decoder layers with linear layers, not {type(model).__name__}")
    return layers


@dataclass(frozen=True)
class LayerMatrix:
    """The weight of a linear layer, or those of a layer's experts, which transformers fuses to three dimensions."""

    weight: nn.Parameter
    """(outputs, inputs), of experts (experts, outputs, inputs)."""
    transposed: bool
    """Whether inputs come before outputs, as far as its module tells."""

    @property
    def inputs(self) -> int:
        """Elements of a row: features that come to the matrix."""
        return self.weight.shape[-2 if self.transposed else -1]


def layer_matrices(model: Any, layer: nn.Module) -> dict[str, LayerMatrix]:
    """The matrices of a decoder layer by their parameters' names in the model; routers and convolutions are none."""
    inner = {id(module) for module in layer.modules()}
    return {
        f"{name}.{leaf}": LayerMatrix(parameter, _is_transposed(module))
        for name, module in model.named_modules() if id(module) in inner
        for leaf, parameter in module.named_parameters(recurse=False) if _is_matrix(module, leaf, parameter)
    }  # fmt: skip


def _is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Conv1D) or bool(getattr(module, _TRANSPOSED, False))


def _is_matrix(module: nn.Module, leaf: str, parameter: nn.Parameter) -> bool:
    if isinstance(module, nn.Linear | Conv1D):
        return leaf == "weight"
    fused = parameter.ndim == _FUSED_DIMENSIONS and parameter.is_floating_point()
    return fused and min(parameter.shape) > 1 and not type(module).__module__.startswith("torch.nn.")
