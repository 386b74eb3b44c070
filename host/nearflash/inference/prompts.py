"""From prompts to tokens: one path for every caller, so that each text is continued as it would be alone.

rows = prompt_rows("Once", partial(encode_text, tokenizer), vocabulary_size(model))
model.generate(**left_padded(rows, pad, model.device))
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nearflash.abi.errors import CommandError

__all__ = ["encode_text", "pad_left", "position_limit", "prompt_rows", "vocabulary_size"]


def prompt_rows(prompts: Any, encode: Callable[[str], Sequence[int]], vocabulary: int) -> list[list[int]]:
    """Token ids of each prompt: a text, or token ids as a list, a tensor or an array of one dimension.

    One text, or one list of ids, is one prompt. Raises CommandError for none, for an empty one, for ids that are no
    whole numbers from 0 to below `vocabulary`, and for what is no prompt.
    """
    if not (listed := _list_prompts(prompts)):
        raise CommandError("prompts must be at least one, not none")
    rows = [_row(prompt, number, encode) for number, prompt in enumerate(listed)]
    for number, row in enumerate(rows):
        if not row:
            raise CommandError(f"prompts must have a token at least, but number {number} is empty: leave it out")
        if wrong := [token for token in row if not 0 <= token < vocabulary]:
            raise CommandError(
                f"tokens of prompt {number} must be 0 to {vocabulary - 1}, as the model's embeddings are, not "
                f"{wrong[0]}: take the model's own tokenizer"
            )
    return rows


def encode_text(tokenizer: Any, text: str, *, chat: bool = False) -> list[int]:
    """Token ids of a text; with `chat` of a user's message by the tokenizer's template, whose special tokens are all.

    Raises CommandError for a text that UTF-8 does not have, and for a tokenizer without a template.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CommandError(
            f"prompt must be a text that UTF-8 has, but character {error.start} is half of one"
        ) from error
    if chat:
        if not tokenizer.chat_template:
            raise CommandError("chat must be False for a model whose tokenizer has no template, not True")
        message = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    ids: list[int] = tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    return ids


def pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of a batch: new tokens follow the last of each row, whatever its length."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def vocabulary_size(model: Any) -> int:
    """Tokens that a model has embeddings of."""
    return int(model.get_input_embeddings().weight.shape[0])


def position_limit(config: Any) -> int | None:
    """Tokens of a sequence that a model has positions for; None where nothing limits them.

    That is so for ALiBi, for a rotary embedding that grows with the sequence, and where the configuration states none.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    kinds = {form.get("rope_type") for form in (rope, *rope.values()) if isinstance(form, dict)} if rope else set()
    if getattr(text, "alibi", False) or "dynamic" in kinds:
        return None
    limit = getattr(text, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _list_prompts(prompts: Any) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]
    if isinstance(prompts, list | tuple) or getattr(prompts, "ndim", None) == 2:
        listed = list(prompts)
        return [listed] if listed and all(_is_id(item) for item in listed) else listed
    raise CommandError(f"prompts must be texts, or lists of token ids, not {_show(prompts)}")


def _row(prompt: Any, number: int, encode: Callable[[str], Sequence[int]]) -> list[int]:
    if isinstance(prompt, str):
        return list(encode(prompt))
    listed = prompt.tolist() if getattr(prompt, "ndim", None) == 1 else prompt
    if not isinstance(listed, list | tuple) or not all(_is_id(token) for token in listed):
        raise CommandError(f"prompt {number} must be a text, or a list of token ids, not {_show(prompt)}")
    return [int(token) for token in listed]


def _is_id(value: Any) -> bool:
    """Whether it is a whole number: no bool, no float that would lose its fraction."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0


def _show(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
