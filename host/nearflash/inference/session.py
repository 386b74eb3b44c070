"""A conversation, or a long text, whose K and V are computed once: each prompt brings only what is new of it.

    with open_engine(shape, policy, tokens=8192, sequences=1, path=Path("chat.kv"), keep=True) as engine:
        print(Session(model, tokenizer, engine).reply("Why is the sky blue?").texts[0])

With an engine that keeps its sequences (`keep=True`) it goes on in another process tomorrow, and after a crash: then
with the turns that came to their end, and the full KV page groups of the one that did not.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, TextIO

import torch
from transformers import StoppingCriteriaList

from nearflash.abi.errors import CommandError, StateError, StorageFullError
from nearflash.identity import ModelIdentity
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.cache.decoder import check_all_layers
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.inference.generate import Generated, ends_of, settings_of
from nearflash.inference.progress import GenerationClock, GenerationProgress, ProgressCallback, TextOut
from nearflash.inference.prompts import encode_text, prompt_rows, vocabulary_size
from nearflash.inference.settings import Caller, check_seed, raise_command_errors
from nearflash.support.closing import Closing
from nearflash.support.tables import check_fields, check_integers

__all__ = ["Session"]


class Session(Closing):
    """The one sequence of an engine, continued prompt by prompt. Calls come from one thread.

    Raises StateError where the engine holds a session of another model (all that `ModelIdentity` compares:
    configuration, every weight, adapters, tokenizer, …), or sequences that are none; what `attach` and
    `ModelIdentity.of` raise.
    The model and the tokenizer must stay as they are: each turn raises StateError, and stores nothing, where either was
    edited since; put back as it was, it goes on.
    identity: the model's, where that is known. stored: names of weights that are read from files at each use, which
    nobody edits.
    """

    def __init__(
        self, model: Any, tokenizer: Any, engine: Engine, *, identity: ModelIdentity | None = None,
        stored: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._engine = attach(model), tokenizer, engine
        self._stored = dict.fromkeys(stored, "")
        self._unedited = self._quick_identity()
        self._digests = {"identity": (identity or ModelIdentity.of(model, tokenizer)).parts} if engine.is_kept else {}
        self._cache: NearflashCache | None = None
        self._sequence: int | None = None
        self._text = ""
        self._finished = 0
        """Leading tokens that are those of `_text`, of turns that came to their end."""
        self.messages: list[dict[str, str]] = []
        """Of the conversation: `role` and `content`."""
        self.tokens: list[int] = []
        """All so far, replies too; after an error those that were to be continued."""
        if engine.is_kept:
            check_all_layers(model.config)
            self._restore()

    @property
    def stored_tokens(self) -> int:
        """Leading ones of `tokens` whose K and V are stored, so far as is known."""
        if self._cache is not None and self._cache.sequences:
            return self._cache.lengths[0]
        return 0 if self._sequence is None else min(self._engine.lengths[self._sequence], len(self.tokens))

    def reply(self, message: str, **options: Any) -> Generated:
        """The model's reply to a user's message, by the tokenizer's template; `options` as `generate` takes them.

        A message that ends in an error, or an interrupt, counts as not said.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        text = self._render(messages)
        if self._finished and text.startswith(self._text):
            tokens = (
                self.tokens[: self._finished]
                + self._tokenizer(text[len(self._text) :], add_special_tokens=False)["input_ids"]
            )
        else:
            tokens = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        done = self._continue(tokens, **options)
        messages += [{"role": "assistant", "content": done.texts[0]}]
        self._finish(messages, text + str(self._tokenizer.decode(done.tokens[0])))
        return done

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generated:
        """Continue a text, or a list of token ids, as `options` of model.generate and the model's generation
        configuration state. What its beginning shares with the tokens so far is not computed again; it takes their
        place.

        Options of ours: `max_new_tokens`, `progress`, `stream` and `seed`, as in nearflash.inference.generate.
        Raises CommandError for an empty prompt, StorageFullError where the engine has no room: what was stored stays.
        """
        done = self._continue(prompt, **options)
        self._finish([], "")
        return done

    def close(self) -> None:
        """Free what is stored, unless the engine keeps it."""
        if self._cache is not None and not self._engine.is_kept:
            self._cache.reset()

    # Parts

    def _continue(
        self, prompt: str | Sequence[int], *, max_new_tokens: int | None = None,
        progress: Callable[[GenerationProgress], None] | None = None, stream: TextIO | None = None,
        seed: int | None = None, **options: Any,
    ) -> Generated:  # fmt: skip
        rows = prompt_rows(prompt, partial(encode_text, self._tokenizer), vocabulary_size(self._model))
        if len(rows) > 1:
            raise CommandError(f"prompt must be one, not {len(rows)}: a session is of one sequence")
        prompt = rows[0]
        settings = settings_of(self._model, self._tokenizer, Caller.SESSION, rows, max_new_tokens, options)
        ends = ends_of(settings, self._tokenizer)
        check_seed(seed)
        self._check_model()
        before = self._engine.counters + EngineCounters()
        clock = GenerationClock(self._engine, before, 1, 1, settings.max_new_tokens, progress)
        ids = torch.tensor([prompt], device=self._model.device)
        if seed is not None:
            torch.manual_seed(seed)
        try:
            # transformers' search for drafts passes all tokens to the model, those that are stored, too.
            least_new = len(prompt) if settings.fields["prompt_lookup_num_tokens"] else 2
            reused = self._reuse(prompt, least_new=least_new)
            cache = self._cache
            assert cache is not None, "made by _reuse"
            with raise_command_errors(lambda: cache.get_seq_length() == reused):
                out = self._model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                    stopping_criteria=StoppingCriteriaList([ProgressCallback(clock, 0), ends]),
                    streamer=None if stream is None else TextOut(self._tokenizer, stream), **settings.options,
                )  # fmt: skip
            cache.check_complete(out.shape[1] - 1)
            cache.behind.wait()
            self._check_model(computed=True)
        except BaseException:
            if self._cache is not None:
                self._cache.behind.close()
            self._cache = None  # its layers may differ in length
            raise
        new = ends.new_tokens(0, out[0].tolist(), len(prompt))
        self.tokens = prompt + new
        texts = self._tokenizer.batch_decode([new], skip_special_tokens=True)
        return Generated(texts, [new], clock.prefill_s, clock.decode_s, self._engine.counters - before, reused)

    def _quick_identity(self) -> ModelIdentity:
        return ModelIdentity.of(self._model, self._tokenizer, stored=self._stored, quick=True)

    def _check_model(self, *, computed: bool = False) -> None:
        """Raise StateError where model or tokenizer were edited; what was `computed` meanwhile is not used again."""
        changed = self._unedited.differing(self._quick_identity())
        if not changed:
            return
        if computed:
            self.tokens, self._finished = [], 0
            self._note()
        raise StateError(
            f"the model of a session must stay as it was opened, but its {changed} changed since: K and V that are "
            "stored would not fit; put it back as it was, or open another session"
        )

    def _reuse(self, prompt: list[int], least_new: int) -> int:
        """Have the cache hold what the prompt, all but its last tokens, shares with what is stored; so many tokens."""
        # Two tokens at least are computed: together they attend to all, as a prompt's do; one would by the policy.
        given = zip(self.tokens, prompt[:-least_new], strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], given))
        stored = self.stored_tokens
        reused = min(same, stored)
        sequence, is_kept = self._sequence, self._engine.is_kept
        if sequence is not None and (reused or is_kept) and (self._cache is None or not reused):
            # Also of nothing: a sequence that is kept has the note of the turns so far until the new one is there.
            self._engine.crop(sequence, reused)
            self._cache = NearflashCache.of_sequences(self._engine, self._model.config, [sequence], [reused])
        elif self._cache is None:
            self._sequence = None
            if sequence is not None:
                self._engine.free(sequence)
            self._cache = NearflashCache(self._engine, self._model.config)
        elif reused < stored:
            self._cache.crop(reused - stored)
        self._sequence = self._cache.batch_sequences(1)[0]
        self.tokens, self._finished = prompt, self._finished if same >= self._finished else 0
        self._note()  # before anything is stored that these tokens do not account for
        return reused

    def _finish(self, messages: list[dict[str, str]], text: str) -> None:
        """The turn has come to its end: these are the conversation's messages, and its text. The note is last: with it
        the turn is said."""
        self._flush()
        before = self.messages, self._text, self._finished
        self.messages, self._text, self._finished = messages, text, len(self.tokens) if text else 0
        try:
            self._note()
        except BaseException:
            self.messages, self._text, self._finished = before
            raise
        self._flush()

    def _flush(self) -> None:
        with suppress(StorageFullError):  # the last tokens, for which there is no room, are computed again
            self._engine.flush()

    def _note(self) -> None:
        assert self._sequence is not None, "made by _reuse"
        info = {"tokens": self.tokens, "finished": self._finished, "text": self._text, "messages": self.messages}
        self._engine.note(self._sequence, self._digests | info)

    def _restore(self) -> None:
        what = f"the session on {self._engine.name}"
        noted = {sequence: info for sequence, info in self._engine.notes.items() if info}
        if len(noted) > 1:
            raise StateError(f"{what} must be of one sequence, not of {len(noted)}: they are another program's")
        for sequence, info in noted.items():
            identity, tokens, finished, text, messages = check_fields(
                what, info, identity=dict, tokens=list, finished=int, text=str, messages=list
            )
            parts = self._digests["identity"]
            if others := ", ".join(name for name in parts if identity.get(name) != parts[name]):
                raise StateError(
                    f"{what} must be of this model and tokenizer, but its {others} are another one's: K and V would "
                    "not fit; load what it was kept with, or name another file"
                )
            self.tokens, self._text = check_integers(f"tokens of {what}", tokens), text
            for message in messages:
                check_fields(f"a message of {what}", message, role=str, content=str)
            if finished > len(tokens):
                raise StateError(f"{what} must have at most {len(tokens)} finished tokens, not {finished}")
            self.messages, self._sequence, self._finished = messages, sequence, finished
        for sequence in set(self._engine.lengths) - set(noted):
            self._engine.free(sequence)  # of somebody who died before saying what it was

    def _render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the model reads it, up to where its reply begins."""
        if self._tokenizer.chat_template:
            return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        return "\n".join(f"{message['role']}:{message['content']}" for message in messages) + "\nassistant:"
