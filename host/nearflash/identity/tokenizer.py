"""The digest of a tokenizer: vocabulary, merges, added and special tokens, normaliser, chat template."""

import hashlib
from pathlib import Path
from typing import Any

from nearflash.identity.plain import OPAQUE, digest_of, plain

__all__ = ["tokenizer_digest"]

_RUNTIME = frozenset({
    "name_or_path", "init_inputs", "init_kwargs", "files_loaded", "deprecation_warnings", "verbose", "backend",
    "model_max_length", "padding_side", "truncation_side", "vocab_file",
})  # fmt: skip
"""Attributes that change no text's tokens: where it was read, what it has warned of, padding, which callers choose."""


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256, hexadecimal, of a transformers tokenizer's whole content.

    Of a fast one the library's own serialisation, without the padding and truncation of the last call; of another one
    its vocabulary, added tokens and the files that it was read from.
    """
    names = {key: plain(value) for key, value in vars(tokenizer).items() if key[:1] != "_" and key not in _RUNTIME}
    deciding = {key: value for key, value in names.items() if value is not OPAQUE}
    deciding["class"] = type(tokenizer).__name__
    deciding["special"] = {str(key): str(value) for key, value in tokenizer.special_tokens_map.items()}
    for key in ("add_bos_token", "add_eos_token"):
        deciding[key] = plain(getattr(tokenizer, key, None))
    deciding["content"] = _content(tokenizer)
    return digest_of(deciding)


def _content(tokenizer: Any) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        start, mark, after = str(fast.to_str()).partition('"added_tokens":')
        return hashlib.sha256((after if mark else start).encode()).hexdigest()
    added = {str(number): repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
    files = {
        key: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for key in getattr(tokenizer, "vocab_files_names", {})
        if (path := getattr(tokenizer, key, None)) and Path(path).is_file()
    }
    return digest_of({"vocabulary": plain(tokenizer.get_vocab()), "added": added, "files": files})
