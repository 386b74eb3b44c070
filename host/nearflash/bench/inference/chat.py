"""A chat over a long stored history: time to the first token of each turn, against computing the history again.

    stored    the turns one after the other, by one process
    reopened  the store is closed after every turn, and opened for the next: its opening counts
    killed    a process is killed (SIGKILL) in turn KILLED_TURN; this one opens the store and goes on from that turn
    computed  transformers' own generate on the whole conversation, no K and V stored: the first turn and the last

The history is English text (pydoc_data.topics) in the first message; each case begins with a copy of the file in which
its K and V were stored once. Where a turn was cut off, its last tokens (fewer than a KV page group has) are computed
again, then by dense attention, as prompts are.
"""

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import DynamicCache

from nearflash.bench.inference.texts import extend_positions, manual_pieces
from nearflash.bench.options import Option
from nearflash.inference.cache.attention import NAME
from nearflash.inference.calibration.choose import choose_policy
from nearflash.inference.engines.base import Engine
from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.session import Session
from nearflash.inference.setup import drive_profile, open_engine
from nearflash.storage.kv import read_kept_layout
from nearflash.storage.kv.journal import journal_path
from nearflash.weights.pretrained import SMOLLM2

__all__ = ["run"]

KILLED_TURN = 5
_CHOICES = ("auto", "dense")
QUESTIONS = (
    "Which statement of the text would you explain first?", "Say it in one sentence.", "What is an example of it?",
    "And what is the opposite?", "When would one not use it?", "Which word of the text is the rarest?",
    "What did I ask you first?", "Name two more statements.", "Which of the two is older?", "Thank you. What is left?",
)  # fmt: skip
_TURN_TOKENS = 96
"""Room for a question, and for what the template puts around it."""
_CACHE_BYTES = 256 << 20
"""Of what an engine reads, in memory."""


@dataclass(frozen=True)
class _Turn:
    number: int
    time_to_first_token_s: float
    reused_tokens: int
    tokens: list[int]
    """Of the reply."""
    prompt: list[int]


@dataclass(frozen=True)
class _Chat:
    """A model, and how its sessions are opened."""

    name: str
    room_tokens: int
    new_tokens: int
    dense: bool

    def model(self) -> tuple[Any, Any]:
        """Model and tokenizer; rotary positions scaled (YaRN) where the room is more than the model's positions."""
        model, tokenizer = load_model(self.name)
        extend_positions(model, self.room_tokens)
        return model, tokenizer

    def engine(self, model: Any, path: Path) -> tuple[Engine, str]:
        """The engine that keeps its sequences in the file `path`, and what it attends by."""
        shape, profile = kv_shape(model), drive_profile(path)
        stored = read_kept_layout(path)
        policy, layout, sentence = choose_policy(
            model.config, shape, self.room_tokens, stored=stored, profile=profile, cache_bytes=_CACHE_BYTES,
            model=model,
        )  # fmt: skip
        if self.dense:
            policy, layout, sentence = AttentionPolicy(), stored, "policy: dense, as the options say"
        engine = open_engine(
            shape, policy, tokens=self.room_tokens, sequences=1, path=path, layout=stored or layout, keep=True,
            cache_bytes=_CACHE_BYTES,
        )  # fmt: skip
        return engine, sentence

    def turns(self, session: Session, first: int, last: int, start: float | None = None) -> Iterator[_Turn]:
        """Turns `first` to `last`; the first one counts from `start`."""
        opened_s = 0.0 if start is None else time.perf_counter() - start
        for number in range(first, last + 1):
            done = session.reply(QUESTIONS[number - 1], max_new_tokens=self.new_tokens)
            new = done.tokens[0]
            yield _Turn(number, opened_s + done.prefill_s, done.reused_tokens, new, session.tokens[: -len(new)])
            opened_s = 0.0


def run(
    model: Annotated[str, Option("Talk to the model of this folder, or smollm2.", metavar="DIR")] = SMOLLM2,
    tokens: Annotated[int, Option("Tokens of the history.", int, metavar="N")] = 16384,
    new_tokens: Annotated[int, Option("Tokens of a reply.", int, metavar="N")] = 16,
    attention: Annotated[
        str,
        Option("auto, or dense: replies are then the same, whatever was computed again.", choices=_CHOICES),
    ] = "auto",
    path: Annotated[Path | None, Option("Folder on the disk (default: of temporary files).", Path)] = None,
) -> Iterator[dict[str, Any]]:
    """A row for each turn of each case, and what they come to. Raises CommandError for a model that is not there."""
    chat = _Chat(model, tokens + len(QUESTIONS) * (new_tokens + _TURN_TOKENS), new_tokens, attention == "dense")
    loaded, tokenizer = chat.model()
    with tempfile.TemporaryDirectory(dir=path) as folder:
        history = Path(folder) / "history"
        print(f"K and V of {tokens} tokens of history", file=sys.stderr, flush=True)
        engine, policy = chat.engine(loaded, history)
        with engine, Session(loaded, tokenizer, engine) as session:
            done = session.reply(_history(tokenizer, tokens), max_new_tokens=1)
            tokens = len(session.tokens)
        yield {"case": "history", "tokens": tokens, "time_to_first_token_s": done.prefill_s, "policy": policy,
               "rope": loaded.config.get_text_config(decoder=True).rope_parameters,
               "threads": torch.get_num_threads()}  # fmt: skip
        turns: dict[str, list[_Turn]] = {}
        for name, talk in (("stored", _run_stored), ("reopened", _run_reopened), ("killed", _run_killed)):
            copy = _copy(history, Path(folder) / name)
            turns[name] = []
            for turn in talk(chat, loaded, tokenizer, copy):
                turns[name].append(turn)
                yield {"case": name, **_row(turn)}
        computed = [_compute_again(loaded, turns["stored"][index], new_tokens) for index in (0, -1)]
        for turn in computed:
            yield {"case": "computed", **_row(turn)}
    yield _summary(turns, computed)


def _run_stored(chat: _Chat, model: Any, tokenizer: Any, path: Path) -> Iterator[_Turn]:
    engine, _ = chat.engine(model, path)
    with engine, Session(model, tokenizer, engine) as session:
        yield from chat.turns(session, 1, len(QUESTIONS))


def _run_reopened(chat: _Chat, model: Any, tokenizer: Any, path: Path) -> Iterator[_Turn]:
    for number in range(1, len(QUESTIONS) + 1):
        start = time.perf_counter()
        engine, _ = chat.engine(model, path)
        with engine, Session(model, tokenizer, engine) as session:
            yield from chat.turns(session, number, number, start)


def _run_killed(chat: _Chat, model: Any, tokenizer: Any, path: Path) -> Iterator[_Turn]:
    """The turns from the one on in which the process was killed."""
    processes = get_context("spawn")
    mine, its = processes.Pipe()
    process = processes.Process(target=_run_until_killed, args=(chat, path, its))
    process.start()
    its.close()
    mine.recv()  # a reply's second token is there, its turn is not at its end
    process.kill()
    process.join()
    start = time.perf_counter()
    engine, _ = chat.engine(model, path)
    with engine, Session(model, tokenizer, engine) as session:
        yield from chat.turns(session, KILLED_TURN, len(QUESTIONS), start)


def _run_until_killed(chat: _Chat, path: Path, told: Connection) -> None:
    """The turns before, and the beginning of the one in which another process kills this one."""
    model, tokenizer = chat.model()
    engine, _ = chat.engine(model, path)
    with engine, Session(model, tokenizer, engine) as session:
        for _ in chat.turns(session, 1, KILLED_TURN - 1):
            pass

        def wait(progress: Any) -> None:
            if progress.step == min(2, chat.new_tokens):
                told.send(progress.step)
                time.sleep(600)

        session.reply(QUESTIONS[KILLED_TURN - 1], max_new_tokens=chat.new_tokens, progress=wait)


def _compute_again(model: Any, turn: _Turn, new_tokens: int) -> _Turn:
    """The same prompt by transformers alone."""
    ids = torch.tensor([turn.prompt])
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            start, cache = time.perf_counter(), DynamicCache(config=model.config)
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
            first_s = time.perf_counter() - start
            new = [int(logits[0, -1].argmax())]
            while len(new) < min(new_tokens, len(turn.tokens)):
                logits = model(torch.tensor([new[-1:]]), past_key_values=cache).logits
                new.append(int(logits[0, -1].argmax()))
    finally:
        model.set_attn_implementation(NAME)
    return _Turn(turn.number, first_s, 0, new, turn.prompt)


def _summary(turns_by_case: dict[str, list[_Turn]], computed: list[_Turn]) -> dict[str, Any]:
    again = statistics.median(turn.time_to_first_token_s for turn in computed)
    first = {
        name: statistics.median(turn.time_to_first_token_s for turn in turns) for name, turns in turns_by_case.items()
    }
    stored = {turn.number: turn.tokens for turn in turns_by_case["stored"]}
    return {
        "time_to_first_token_s": first,
        "time_to_first_token_s_computed": again,
        "speedup_by_case": {name: again / seconds for name, seconds in first.items()},
        "after_kill": again / turns_by_case["killed"][0].time_to_first_token_s,
        "same_tokens": {
            name: sum(turn.tokens == stored[turn.number] for turn in turns) / len(turns)
            for name, turns in (*turns_by_case.items(), ("computed", computed))
        },
        "of": "seconds to the first token of computing all again over those of a turn, medians of turns; same_tokens: "
        "share of the turns whose replies are those of the first case",
    }


def _row(turn: _Turn) -> dict[str, Any]:
    return {"turn": turn.number, "time_to_first_token_s": turn.time_to_first_token_s, "prompt_tokens": len(turn.prompt),
            "reused_tokens": turn.reused_tokens, "reply_tokens": len(turn.tokens)}  # fmt: skip


def _copy(path: Path, copy: Path) -> Path:
    """A kept store's two files under another name."""
    for source, target in ((path, copy), (journal_path(path), journal_path(copy))):
        shutil.copyfile(source, target)
        target.chmod(0o600)
    return copy


def _history(tokenizer: Any, tokens: int) -> str:
    """English text of about so many tokens."""
    return f"Read this text.\n\n{tokenizer.decode(manual_pieces(tokenizer, 1, tokens)[0])}"
