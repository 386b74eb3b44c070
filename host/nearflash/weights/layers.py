"""A model's decoder layers, and their linear layers."""

from typing import Any

from torch import nn

from nearflash.abi.errors import UnsupportedError

__all__ = ["decoder_layers", "layers_with_linears", "linear_layers"]


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


def layers_with_linears(model: Any) -> list[nn.Module]:
    """The decoder layers of a model, in order. Raises UnsupportedError where they have no linear layers."""
    _, layers = decoder_layers(model)
    if not any(linear_layers(model, layer) for layer in layers):
        raise UnsupportedError(f"model must have decoder layers with linear layers, not {type(model).__name__}")
    return layers


def linear_layers(model: Any, layer: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers within a decoder layer, by their names in the model."""
    inner = {id(module) for module in layer.modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in model.named_modules() if id(module) in inner}
