"""Models whose KV cache is to lie on flash: loaded and attached, and the shape of their K and V."""

from pathlib import Path
from typing import Any

from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.storage.kv import KvShape
from nearflash.weights.pretrained import load_pretrained

__all__ = ["kv_shape", "load_model", "model_positions"]


def load_model(name: str | Path, dtype: str = "fp32", *, verbose: bool = False) -> tuple[Any, Any]:
    """Model, attached to near storage, and tokenizer, as `load_pretrained` gives them.

    Raises CommandError for what is not there, and UnsupportedError as `attach` does.
    """
    model, tokenizer = load_pretrained(name, dtype, verbose=verbose)
    return attach(model), tokenizer


def kv_shape(model: Any) -> KvShape:
    """K and V on flash: layers with full attention, KV heads, head dimension. Raises as `kv_shape_of` does."""
    return kv_shape_of(model.config)


def model_positions(config: Any) -> int:
    """Tokens that a model was made for; 32,768 where its configuration does not say."""
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 32_768)
