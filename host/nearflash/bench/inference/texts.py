"""English text that is there everywhere: the reference manual that comes with Python (pydoc_data.topics)."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from nearflash.abi.errors import CommandError
from nearflash.inference.models import model_positions
from nearflash.weights.pretrained import token_ids

__all__ = ["extend_positions", "manual_pieces", "manual_text", "read_texts"]


def manual_text() -> str:
    """All of it, about 600,000 characters."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def read_texts(tokenizer: Any, files: Iterable[Path]) -> list[Sequence[int]]:
    """Token ids of each file's text, or of the manual where there is no file. Raises CommandError."""
    texts: list[Sequence[int]] = [token_ids(tokenizer, file) for file in files]
    return texts or [tokenizer(manual_text(), verbose=False)["input_ids"]]


def manual_pieces(tokenizer: Any, count: int, tokens: int) -> Tensor:
    """Its first tokens as `count` pieces, (count, tokens). Raises CommandError for more than there are."""
    ids = tokenizer(manual_text(), verbose=False)["input_ids"]
    if len(ids) < count * tokens:
        raise CommandError(f"texts must have {count * tokens} tokens in all, not {len(ids)}")
    return torch.tensor(ids[: count * tokens]).reshape(count, tokens)


def extend_positions(model: Any, tokens: int) -> dict[str, Any]:
    """The rotary settings that the model computes with from now on: scaled (YaRN) where tokens exceed its positions.

    Called again with more tokens it scales those that the model was made for, not those of the call before.
    """
    config = model.config.get_text_config(decoder=True)
    if tokens > model_positions(model.config):
        holder, before = model.get_decoder(), config.rope_parameters.get("original_max_position_embeddings")
        positions = before or model_positions(model.config)
        scaling = {"rope_type": "yarn", "factor": float(-(-tokens // positions)),
                   "original_max_position_embeddings": positions}  # fmt: skip
        config.rope_parameters = config.rope_parameters | scaling
        config.max_position_embeddings = tokens
        holder.rotary_emb = type(holder.rotary_emb)(config)
    return dict(config.rope_parameters)
