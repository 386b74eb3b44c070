"""A conversation whose history stays on flash: each turn brings only its own tokens.

python -m nearflash.inference.examples.chat --model smollm2
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Self

import torch

from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.engines.base import Engine
from nearflash.inference.engines.setup import CPU, open_engine
from nearflash.inference.models import SMOLLM2, kv_shape, load_model
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy

__all__ = ["Conversation", "main"]

POLICY = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=0.25, top_p=0.95, min_tokens=256)


class Conversation:
    """Turns of a user and a model: only what is new is computed, the history is on flash."""

    def __init__(self, model: Any, tokenizer: Any, engine: Engine) -> None:
        self._model, self._tokenizer = attach(model), tokenizer
        self._cache = NearflashCache(engine, model.config)
        self._messages: list[dict[str, str]] = []
        self._text = ""
        self.tokens: list[int] = []
        """All so far, replies too."""

    def say(self, message: str, max_new_tokens: int = 100) -> str:
        """The model's reply."""
        self._messages.append({"role": "user", "content": message})
        text = self._rendered()
        self.tokens += self._tokenizer(text[len(self._text) :], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([self.tokens], device=self._model.device)
        out = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=self._cache, do_sample=False,
            max_new_tokens=max_new_tokens, pad_token_id=self._tokenizer.pad_token_id,
        )  # fmt: skip
        new = out[0, len(self.tokens) :].tolist()
        self.tokens += new
        reply = str(self._tokenizer.decode(new, skip_special_tokens=True))
        self._text = text + str(self._tokenizer.decode(new))
        self._messages.append({"role": "assistant", "content": reply})
        return reply

    def close(self) -> None:
        """Free the history."""
        self._cache.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rendered(self) -> str:
        """The conversation as the model reads it, up to where its reply begins."""
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(self._messages, add_generation_prompt=True, tokenize=False))
        return "\n".join(f"{one['role']}:{one['content']}" for one in self._messages) + "\nassistant:"


def main(argv: Sequence[str] | None = None) -> int:
    """Reply to each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2)
    parser.add_argument("--device", default=CPU)
    parser.add_argument("--tokens", type=int, default=4096, help="room for the whole conversation")
    arguments = parser.parse_args(argv)
    model, tokenizer = load_model(arguments.model)
    shape = kv_shape(model)
    with open_engine(shape, POLICY, tokens=arguments.tokens, sequences=1, device=arguments.device) as engine:
        with Conversation(model, tokenizer, engine) as conversation:
            for line in sys.stdin:
                print(conversation.say(line.strip()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
