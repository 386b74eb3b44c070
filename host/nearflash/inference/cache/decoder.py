"""A decoder's KV cache on flash: the layers with full attention; the others are transformers' own."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.storage.kv import KvShape

__all__ = ["check_all_layers", "check_decoder", "flash_layers", "head_counts", "kv_shape_of", "own_layer"]

_FULL = "full_attention"


def flash_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Numbers of the layers whose K and V go to flash, ascending."""
    kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return tuple(number for number, kind in enumerate(kinds) if kind == _FULL)


def own_layer(config: PreTrainedConfig, number: int) -> Any:
    """transformers' cache layer for a layer that does not go to flash, empty."""
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return DYNAMIC_LAYER_TYPE_MAPPING[kinds[number]](**options[number])


def kv_shape_of(config: PreTrainedConfig) -> KvShape:
    """K and V on flash: layers, KV heads, head dimension.

    Raises UnsupportedError for a model without such a layer, or whose layers differ; CommandError for a dimension that
    pages do not take.
    """
    text, layers = config.get_text_config(decoder=True), flash_layers(config)
    if not layers:
        raise UnsupportedError(
            f"model must have a layer with full attention, but {text.model_type!r} has none: its K and V do not grow "
            "with the context; generate with transformers' own cache"
        )
    shapes = {head_counts(text.per_layer_config[number]) for number in layers}
    if len(shapes) > 1:
        forms = " and ".join(f"{heads} KV heads of {dim} elements" for heads, dim in sorted(shapes))
        raise UnsupportedError(f"model must have layers with full attention that are alike, not with {forms}")
    return KvShape(len(layers), *shapes.pop())


def head_counts(layer: Any) -> tuple[int, int]:
    """KV heads, as a cache is given them, and head dimension of a layer's configuration.

    One KV head where it states `multi_query`; all heads where it states a decoder that repeats them before the cache.
    Keys that are none of its family's, such as GPT-NeoX's num_key_value_heads, decide nothing, as in transformers.
    """
    heads = layer.num_attention_heads
    dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    if _read_known(layer, "new_decoder_architecture"):
        return heads, dim
    if _read_known(layer, "multi_query"):
        return 1, dim
    return _read_known(layer, "num_key_value_heads") or _read_known(layer, "num_kv_heads") or heads, dim


def _read_known(layer: Any, name: str) -> Any:
    """A key of a configuration, which has any that its file states; None for one that its family does not know."""
    known = getattr(type(layer), "__dataclass_fields__", None)  # none of code that came with a model
    mapped = getattr(type(layer), "attribute_map", {})
    return getattr(layer, name, None) if known is None or name in known or name in mapped else None


def check_decoder(model: Any) -> None:
    """Raise UnsupportedError for a model whose attention near storage cannot compute."""
    config = model.config
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedError(
            "model must have no learned tokens before its prompt (peft's prompt and prefix tuning), whose K and V no "
            "token accounts for: use an adapter of its weights, such as LoRA"
        )
    if (ranks := getattr(model, "tp_size", None) or 1) > 1:
        raise UnsupportedError(
            f"model must be whole in each process, but its tp_plan divides it among {ranks} ranks, each of which would "
            "want a store of its own KV heads: load it without tp_plan, or give ranks whole layers (nearflash plan "
            "--ranks)"
        )
    if reason := _obstacle(model, config, config.get_text_config(decoder=True)):
        raise UnsupportedError(
            f"model must be a decoder with plain softmax attention, but {config.model_type!r} {reason}"
        )


def check_all_layers(config: PreTrainedConfig) -> None:
    """Raise UnsupportedError for a model of which some layers are not on flash."""
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if len(flash_layers(config)) < layers:
        raise UnsupportedError(
            "stored sequences must be of a model with full attention in every layer: those of others are not stored"
        )


def _obstacle(model: Any, config: PreTrainedConfig, text: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "has an encoder, which decoding attends to"
    if getattr(text, "alibi", False) or getattr(getattr(text, "attn_config", None), "alibi", False):
        return "adds ALiBi biases to its scores"
    if getattr(text, "kv_lora_rank", None):
        return "keeps latents in place of K and V (MLA)"
    if not hasattr(text, "num_attention_heads"):
        return "has no attention"
    if not model._can_set_attn_implementation():
        return "has attention of its own, beside transformers' AttentionInterface"
    kinds, _ = get_layer_types_and_kwargs(text)
    if unknown := sorted(set(kinds) - DYNAMIC_LAYER_TYPE_MAPPING.keys() | set(kinds) & {"indexed_attention"}):
        return f"has layers of {', '.join(unknown)}"
    if _FULL not in kinds:
        return None
    try:
        shape = kv_shape_of(config)
    except (CommandError, UnsupportedError) as error:
        return f"has heads that pages do not take: {error}"
    v_dim = getattr(text, "v_head_dim", None) or shape.dim
    dims = {shape.dim, v_dim, *_head_dims(model, set(flash_layers(config)))}
    return f"has heads of {' and '.join(map(str, sorted(dims)))} elements in one model" if len(dims) > 1 else None


def _head_dims(model: Any, layers: set[int]) -> set[int]:
    """Head dimensions of the attention modules of these layers, where they state them."""
    modules = (module for module in model.modules() if getattr(module, "layer_idx", None) in layers)
    return {module.head_dim for module in modules if isinstance(getattr(module, "head_dim", None), int)}
