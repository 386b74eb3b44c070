"""Lives of stores that a guest runs, and what must be found of them after a power cut.

Each `live` marks what it begins (`begin`) and what it was told is durable (`done`); `check` opens what a file system
has after the cut, and compares it with the marks of before the cut (and the first of after it, `following`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nearflash.bench.storage.history import Oracle
from nearflash.bench.storage.kept_crashes import SHAPE, find_mixed
from nearflash.bench.storage.kv_crashes import BUFFER_BYTES, LAYOUT
from nearflash.storage.blocks import BlockStore
from nearflash.storage.blocks.block_file import BlockFile
from nearflash.storage.blocks.transfer import BlockTransfer
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.backend import PositionalBackend
from nearflash.storage.kv import KvStore
from nearflash.storage.kv.kept import open_kept_store
from nearflash.storage.state.state_store import StateStore

__all__ = ["WORKLOADS"]

Mark = Callable[..., None]
Marks = Sequence[dict[str, Any]]


class States:
    """An optimizer's state: steps written and committed."""

    steps: ClassVar = 24

    class _Direct:
        """Makes stores past the page cache, as training does."""

        @staticmethod
        def create(*given: Any, direct: bool, **options: Any) -> StateStore:
            return StateStore.create(*given, direct=True, **options)

    @classmethod
    def live(cls, folder: Path, mark: Mark) -> None:
        """Make a state, then a step after another."""
        oracle = Oracle()
        with oracle.create(cls._Direct, [folder / "state"], PositionalBackend()) as store:  # type: ignore[arg-type]
            mark(done=0)
            for step in range(1, cls.steps + 1):
                mark(begin=step)
                oracle.write(store, (step, 0))
                oracle.commit(store, (step, 0))
                mark(done=step)

    @staticmethod
    def check(folder: Path, marks: Marks, following: Marks) -> str | None:
        """Find the step that was done last, or the one that was begun."""
        done = max(mark["done"] for mark in marks if "done" in mark)
        begun = max([done, *(mark["begin"] for mark in marks if "begin" in mark)])
        oracle = Oracle()
        with StateStore.open([folder / "state"], direct=False) as store:
            for step in range(1, store.steps + 1):
                oracle.note((step, 0), (step - 1, 0))
            if not done <= store.steps <= begun:
                return f"step {store.steps} is not of {done} to {begun}"
            return None if oracle.is_at(store, (store.steps, 0)) else f"step {store.steps} has other bytes"


class Blocks:
    """A block store that evicts: blocks put, some of them got, which are moved then."""

    block_bytes, capacity_bytes, rounds, batch = 8192, 1_500_000, 40, 10

    @classmethod
    def live(cls, folder: Path, mark: Mark) -> None:
        """Put a batch after another, and get old blocks."""
        with BlockStore(folder / "blocks", cls.capacity_bytes, cls.block_bytes, "power") as store:
            mark(done=0, there=[])
            for number in range(1, cls.rounds + 1):
                mark(begin=number)
                blocks = range(cls.batch * number, cls.batch * (number + 1))
                store.put([b"%d" % block for block in blocks], [cls._data(block) for block in blocks])
                everything = [b"%d" % block for block in range(blocks.stop)]
                there = [block for block, present in enumerate(store.contains(everything)) if present]
                mark(done=number, there=there)
                store.mark_used([b"%d" % block for block in there[number % 7 :: 7]])

    @classmethod
    def check(cls, folder: Path, marks: Marks, following: Marks) -> str | None:
        """Find each block that was there, and was not evicted by the next put; none may be another, or damaged."""
        ends = [mark["there"] for mark in marks if "done" in mark][-1:]
        ends += [mark["there"] for mark in following if "done" in mark][:1]
        promised = set.intersection(*map(set, ends))
        with BlockFile.open_existing(folder / "blocks", direct=False, threads=0) as blocks:
            keys = blocks.index.keys()
            numbers = [int(key) for key in keys]
            if wrong := cls._find_wrong(blocks, promised, numbers):
                return wrong
            more = range(10_000, 10_000 + 2 * blocks.layout.segment_slots)
            blocks.write([(BlockTransfer(1), 0, b"%d" % block, cls._data(block)) for block in more])
            wrong = cls._find_wrong(blocks, set(), list(more)[: blocks.layout.segment_slots])
            return wrong and f"going on: {wrong}"

    @classmethod
    def _find_wrong(cls, blocks: BlockFile, promised: set[int], numbers: Sequence[int]) -> str | None:
        transfer, targets = BlockTransfer(len(numbers)), [np.empty(cls.block_bytes, np.uint8) for _ in numbers]
        blocks.submit_read(transfer, [(at, b"%d" % n, targets[at]) for at, n in enumerate(numbers)])
        served = {
            number: target for number, target, hit in zip(numbers, targets, transfer.result(), strict=True) if hit
        }
        if wrong := [number for number, target in served.items() if (target != cls._data(number)).any()]:
            return f"{len(wrong)} blocks have other bytes"
        if missing := promised - served.keys():
            return f"{len(missing)} of {len(promised)} durable blocks are lost"
        damaged = blocks.statistics.damaged
        return f"{damaged} blocks are there and damaged" if damaged else None

    @classmethod
    def _data(cls, number: int) -> Any:
        return np.frombuffer(np.random.default_rng(number).bytes(cls.block_bytes), np.uint8)


class Sessions:
    """A KV store whose sequences are kept: turns of sessions, each of which keeps a part of the one before."""

    turns, sequences, most_tokens = 24, 3, 70
    geometry = FlashGeometry(4096, pages_per_block=8, channels=1, luns=1, blocks=24)

    @classmethod
    def live(cls, folder: Path, mark: Mark) -> None:
        """Crop, note, append and flush, a turn after another."""
        with cls._open(folder, direct=True) as store:
            for _ in range(cls.sequences):
                store.note(store.add(), {"turn": 0})
            store.flush()
            mark(done=0)
            for turn, (number, shared, kv) in enumerate(cls._turns(), 1):
                mark(begin=turn)
                store.crop(number, shared)
                store.note(number, {"turn": turn})
                for layer in range(SHAPE.layers):
                    store.append(number, layer, *kv[:, layer, None, shared:])
                store.flush()
                mark(done=turn)

    @classmethod
    def check(cls, folder: Path, marks: Marks, following: Marks) -> str | None:
        """Find what each last turn had flushed, except what the next one has cut off."""
        turns = cls._turns()
        promised: dict[int, tuple[int, int]] = {}
        for mark in marks:
            turn = mark.get("done", mark.get("begin"))
            if not turn:
                continue
            number, shared, kv = turns[turn - 1]
            tokens, since = promised.get(number, (0, 0))
            size = LAYOUT.group_tokens
            left = tokens if tokens <= shared else shared // size * size
            promised[number] = (kv.shape[2], turn) if "done" in mark else (left, since)
        with cls._open(folder, direct=False) as store:
            for number, (tokens, since) in promised.items():
                found, stated = store.lengths.get(number, 0), store.notes.get(number, {}).get("turn", -1)
                if found < tokens or stated < since:
                    return f"sequence {number} has {found} tokens of turn {stated}, not {tokens} of {since}"
            noted = {number: turns[info["turn"] - 1][2] for number, info in store.notes.items() if info.get("turn")}
            return find_mixed(store, noted)

    @classmethod
    def _open(cls, folder: Path, *, direct: bool) -> KvStore:
        return open_kept_store(
            folder / "kv", SHAPE, LAYOUT, cls.geometry, direct=direct, buffer_bytes=BUFFER_BYTES
        )  # fmt: skip

    @classmethod
    def _turns(cls) -> list[tuple[int, int, Any]]:
        """Of each turn the sequence, the tokens that it keeps, and all K and V then, (2, layers, tokens, d)."""
        rng, turns = np.random.default_rng(7), list[tuple[int, int, Any]]()
        now = [np.zeros((2, SHAPE.layers, 0, SHAPE.dim), np.float16) for _ in range(cls.sequences)]
        for turn in range(cls.turns):
            number = turn % cls.sequences
            shared = int(rng.integers(min(now[number].shape[2], cls.most_tokens - 1) + 1))
            fresh = int(rng.integers(1, cls.most_tokens - shared + 1))
            kv = rng.standard_normal((2, SHAPE.layers, fresh, SHAPE.dim), np.float32).astype(np.float16)
            now[number] = np.concatenate([now[number][:, :, :shared], kv], axis=2)
            turns.append((number, shared, now[number]))
        return turns


WORKLOADS = {"state": States, "blocks": Blocks, "sessions": Sessions}
