"""The subject `session` of the bench `fuzz`: a conversation on disk, of a small random model."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.bench.storage.fuzz.mutations import Files, FuzzedFormat, pieces
from nearflash.bench.storage.fuzz.stores import forge_label, sequence_values
from nearflash.storage.io.backend import BLOCK_BYTES

__all__ = ["session"]

_NAME = "kv"
_WORDS = [f"w{number}" for number in range(61)]
_TURNS = ("w5 w7 w9 w11 " * 10, "w2 w3 w4 " * 6, "w8 w6 " * 4)


def session(folder: Path) -> FuzzedFormat:
    """Two turns and a third; others are a copy whose third turn was another one, and another conversation."""
    model, tokenizer = _model(), _tokenizer()
    own, branch, other = (folder / name for name in ("own", "branch", "other"))
    known: list[tuple[list[int], Any]] = []
    _talk(model, tokenizer, own, _TURNS[:2], known)
    shutil.copytree(own, branch)
    _talk(model, tokenizer, own, _TURNS[2:], known)
    _talk(model, tokenizer, branch, ["w30 w31 w32"], [])
    _talk(model, tokenizer, other, [turn.replace("w", "w1") for turn in ("w5 w7 w9 w8 " * 10, "w2 w3 w4 " * 6)], [])

    def read(place: Path) -> object:
        tokens, values = _read_stored(model, tokenizer, place)
        return tokens, values.tobytes(), values.shape

    def accepts(content: Any, expected: object) -> bool:
        """The beginning of what one of the turns left: a turn that was lost is computed again."""
        tokens, data, shape = content
        values = np.frombuffer(data, np.float16).reshape(shape)
        return not tokens or any(
            tokens == stored[: len(tokens)] and np.array_equal(values, kept[:, :, :, : values.shape[3]])
            for stored, kept in known
        )

    files, *others = ({file.name: file.read_bytes() for file in path.iterdir()} for path in (own, branch, other))

    def forge(rng: random.Random) -> Files:
        return forge_label(files, _NAME, rng)

    return FuzzedFormat(files, read, forge, pieces(files, others, BLOCK_BYTES), accepts=accepts)


def _talk(model: Any, tokenizer: Any, folder: Path, turns: Any, known: list[tuple[list[int], Any]]) -> None:
    """Continue the session in a folder; what it holds after each turn goes to `known`."""
    from nearflash.inference.session import Session

    folder.mkdir(exist_ok=True)
    for turn in turns:
        with _engine(model, folder) as engine:
            Session(model, tokenizer, engine).reply(turn, max_new_tokens=3)
        known.append(_read_stored(model, tokenizer, folder))


def _read_stored(model: Any, tokenizer: Any, folder: Path) -> tuple[list[int], Any]:
    """Tokens whose K and V are stored, and those (layers, 2, heads, tokens, d)."""
    from nearflash.inference.session import Session

    with _engine(model, folder) as engine:
        opened = Session(model, tokenizer, engine)
        tokens = opened.tokens[: opened.stored_tokens]
        number = next(iter(engine.lengths), 0)
        layers = range(model.config.num_hidden_layers if tokens else 0)
        values = [sequence_values(engine.store, number, layer, len(tokens)) for layer in layers]
        return tokens, np.stack(values) if values else np.zeros((0, 2, 0, 0, 0), np.float16)


def _engine(model: Any, folder: Path) -> Any:
    from nearflash.inference.models import kv_shape
    from nearflash.inference.policy.policy import AttentionPolicy
    from nearflash.inference.setup import open_engine

    shape = kv_shape(model)
    return open_engine(shape, AttentionPolicy(), tokens=300, sequences=1, path=folder / _NAME, keep=True)


def _model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(_WORDS), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token=_WORDS[1]))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=_WORDS[0], unk_token=_WORDS[1])
