"""Subjects of the bench `fuzz`: states of training, and keys and values on flash."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.bench.storage.fuzz.mutations import (
    FILE,
    Files,
    FuzzedFormat,
    Range,
    forge_json,
    pieces,
    range_pieces,
    seal_block,
)
from nearflash.bench.storage.history import Oracle, Version
from nearflash.bench.storage.kv_crashes import GEOMETRY, LAYOUT, SHAPE
from nearflash.storage import StateStore
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.spare import SpareRecords
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.sealed import unseal
from nearflash.storage.kv import KvStore
from nearflash.storage.kv.journal import journal_path
from nearflash.storage.kv.kept import open_kept_store
from nearflash.storage.state.exchange import export_state, import_state
from nearflash.storage.state.safetensors import encode_header

__all__ = ["export", "flash", "forge_label", "lasting", "sequence_values", "state"]

F16 = NDArray[np.float16]


# States


def state(folder: Path) -> FuzzedFormat:
    """A state after three steps; others are a copy that took another third step, and another run's."""
    oracle, own, branch, other = Oracle(), folder / "own", folder / "branch", folder / "other"
    with oracle.create(StateStore, [own], PositionalBackend()) as store:
        _steps(oracle, store, [(1, 0), (2, 0)])
    shutil.copyfile(own, branch)
    for path, third in ((own, (3, 0)), (branch, (3, 1))):
        with StateStore.open(path, direct=False) as store:
            _steps(oracle, store, [third])
    with oracle.create(StateStore, [other], PositionalBackend()) as store:
        _steps(oracle, store, [(1, 2), (2, 2), (3, 2)])

    files, *others = ({FILE: path.read_bytes()} for path in (own, branch, other))
    mixed = pieces(files, others, BLOCK_BYTES)
    return FuzzedFormat(files, _read_state, lambda rng: {FILE: _forge_state(files[FILE], rng)}, mixed)


def _steps(oracle: Oracle, store: StateStore, versions: Sequence[Version]) -> None:
    for version in versions:
        oracle.write(store, version)
        oracle.commit(store, version)


def _read_state(folder: Path) -> object:
    with StateStore.open(folder / FILE, direct=False) as store:
        arrays = [store.read_array(array.name).tobytes() for array in store.manifest.arrays]
        return store.stamp, store.tensor_steps, store.metadata, store.manifest, arrays


def _forge_state(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    superblocks = [unseal("superblock", _block(data, slot * BLOCK_BYTES, BLOCK_BYTES)) for slot in (0, 1)]
    kind, slot = rng.choice(["superblock", "manifest", "table"]), rng.randrange(2)
    if kind == "superblock":
        if block := seal_block(kind, forge_json(superblocks[slot], rng), BLOCK_BYTES):
            data[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = block
        return bytes(data)
    start = 2 * BLOCK_BYTES
    if kind == "table":
        starts = [at for at in range(start, len(data), BLOCK_BYTES) if data[at:].startswith(b"nearflash.table")]
        start = starts[slot]
    size = superblocks[slot][f"{kind}_bytes"]
    block = seal_block(kind, forge_json(unseal(kind, _block(data, start, size)), rng), size)
    if block is not None:
        data[start : start + len(block)] = block
        for number in (0, 1) if kind == "manifest" else (slot,):
            body = superblocks[number] | {f"{kind}_crc32c": crc32c(np.frombuffer(block, np.uint8))}
            data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = seal_block("superblock", body, BLOCK_BYTES) or b""
    return bytes(data)


def _block(data: bytes | bytearray, start: int, size: int) -> Any:
    return np.frombuffer(bytes(data[start : start + size]), np.uint8)


def export(folder: Path) -> FuzzedFormat:
    """An exported state; another one is of the same tensors after other steps."""
    oracle = Oracle()
    for name, history in (("own", 0), ("other", 1)):
        with oracle.create(StateStore, [folder / f"{name}.state"], PositionalBackend()) as store:
            _steps(oracle, store, [(1, history)])
            export_state(store, folder / name)

    def read(mutated: Path) -> object:
        target = folder / "imported"
        target.unlink(missing_ok=True)
        with import_state(mutated / FILE, [target], direct=False) as store:
            arrays = [store.read_array(array.name) for array in store.manifest.arrays]
            parts = [  # without the padding between tensors, which an export does not hold
                whole[t.start // a.params_per_element :][: a.size_bytes(t.params) // a.element_bytes].tobytes()
                for a, whole in zip(store.manifest.arrays, arrays, strict=True)
                for t in store.manifest.tensors
            ]
            return store.profile, store.steps, store.tensor_steps, store.metadata, store.manifest, parts

    own, other = ({FILE: (folder / name).read_bytes()} for name in ("own", "other"))
    return FuzzedFormat(own, read, lambda rng: {FILE: _forge_export(own[FILE], rng)}, pieces(own, [other], 64))


def _forge_export(content: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header["__metadata__"]
    if rng.random() < 0.5:
        metadata["nearflash"] = json.dumps(forge_json(json.loads(metadata["nearflash"]), rng))
    else:
        header = forge_json(header, rng)
    text = encode_header(header) if isinstance(header, dict) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


# Keys and values


def flash(folder: Path) -> FuzzedFormat:
    """Pages of a store that keeps nothing beside them; others are of the same keys, with other contents."""
    files, places = [], []
    for number in range(2):
        path, rng = folder / f"flash-{number}", np.random.default_rng(number)
        with KvStore(FileFlash.create(path, GEOMETRY, direct=False), SHAPE, LAYOUT) as store:
            sequence = store.add()
            size = (2, SHAPE.kv_heads, 96, SHAPE.dim)
            store.append(sequence, 0, *rng.standard_normal(size, dtype=np.float32).astype(np.float16))
            keys = store.pages.token_keys(sequence, 0, range(6)).reshape(-1)
            places.append((store.layer(sequence, 0).token_pages.reshape(-1), keys))
        files.append({FILE: path.read_bytes()})

    def read(folder: Path) -> object:
        with FileFlash.open(folder / FILE, direct=False) as opened:
            return opened.geometry, opened.about, opened.read(*places[0]).data.tobytes()

    own = files[0]
    mixed = range_pieces(own, files[1:], lambda _: _blocks(FILE), BLOCK_BYTES)
    return FuzzedFormat(own, read, lambda rng: forge_label(own, FILE, rng), mixed)


def _blocks(name: str) -> list[Range]:
    """Bytes of every block of the flash with its records, as often as it has pages, and of every page."""
    zone_bytes, page_bytes = SpareRecords(GEOMETRY).zone_bytes, GEOMETRY.page_bytes
    size = GEOMETRY.block_bytes + zone_bytes
    starts = [BLOCK_BYTES + number * size for number in range(GEOMETRY.blocks)]
    pages = [at + page * page_bytes for at in starts for page in range(GEOMETRY.pages_per_block)]
    return [(name, at, at + size) for at in starts] * GEOMETRY.pages_per_block + [
        (name, at, at + page_bytes) for at in pages
    ]


def forge_label(files: Files, name: str, rng: random.Random) -> Files:
    """The files with another label of the flash in one of them."""
    content = files[name]
    block = seal_block("flash", forge_json(unseal("flash", _block(content, 0, BLOCK_BYTES)), rng), BLOCK_BYTES)
    return files if block is None else {**files, name: block + content[BLOCK_BYTES:]}


_KV = "kv"
_TURNS = ((0, 40), (20, 50), (33, 48))
"""Of each turn of the sequence: tokens that stay of the one before, and tokens at its end."""


def lasting(folder: Path) -> FuzzedFormat:
    """A sequence that outlasts its store, with a note of each turn; others are a copy that went on otherwise, and
    another store's sequence of the same numbers.
    """
    size = (2, SHAPE.kv_heads, 64, SHAPE.dim)
    *turns, another = (np.random.default_rng(seed).standard_normal(size).astype(np.float16) for seed in range(4))
    own, branch, other = (folder / name for name in ("own", "branch", "other"))
    versions: dict[str, F16] = {}
    _live(own, turns[:2], versions)
    shutil.copytree(own, branch)
    _live(own, turns, versions, first=2)
    _live(branch, [*turns[:2], another], {}, first=2, name="branch")
    _live(other, [another] * 3, {}, name="other")

    def read(folder: Path) -> object:
        with _open_kept(folder) as store:
            return {number: (info.get("turn"), _kv(store, number)) for number, info in store.notes.items()}

    def accepts(content: Any, expected: object) -> bool:
        """Every sequence is the beginning of what its note states; one without a note is nobody's, and is freed."""
        return all(
            kv is None or turn is None or (turn in versions and np.array_equal(versions[turn][:, :, : kv[1]], kv[0]))
            for turn, kv in ((turn, _array(kv)) for turn, kv in content.values())
        )

    files, *others = ({file.name: file.read_bytes() for file in path.iterdir()} for path in (own, branch, other))
    mixed = range_pieces(files, others, lambda _: _blocks(_KV), BLOCK_BYTES)
    return FuzzedFormat(files, read, lambda rng: forge_label(files, _KV, rng), mixed, accepts=accepts)


def _open_kept(folder: Path) -> KvStore:
    return open_kept_store(folder / _KV, SHAPE, LAYOUT, GEOMETRY, direct=False)


def _live(folder: Path, turns: Sequence[F16], versions: dict[str, F16], *, first: int = 0, name: str = "own") -> None:
    """The turns of a sequence from number `first` on; what each note states goes to `versions`."""
    folder.mkdir(exist_ok=True)
    with _open_kept(folder) as store:
        number = next(iter(store.lengths)) if first else store.add()
        for turn in range(first, len(turns)):
            kept_tokens, tokens = _TURNS[turn]
            before = versions.get(f"{name} {turn - 1}", turns[turn])
            versions[f"{name} {turn}"] = np.concatenate(
                [before[:, :, :kept_tokens], turns[turn][:, :, kept_tokens:tokens]], axis=2
            )
            if turn:
                store.crop(number, kept_tokens)
            store.note(number, {"turn": f"{name} {turn}"})
            store.append(number, 0, *turns[turn][:, :, kept_tokens:tokens])
            store.flush()


def _kv(store: KvStore, number: int) -> tuple[bytes, int] | None:
    tokens = store.lengths[number]
    return (sequence_values(store, number, 0, tokens).tobytes(), tokens) if tokens else None


def _array(kv: tuple[bytes, int] | None) -> tuple[F16, int] | None:
    if kv is None:
        return None
    return np.frombuffer(kv[0], np.float16).reshape(2, SHAPE.kv_heads, kv[1], SHAPE.dim), kv[1]


def sequence_values(store: KvStore, number: int, layer: int, tokens: int) -> F16:
    """K and V of a sequence (2, heads, tokens, d), as its pages hold them, the last tokens as memory has them.

    Its index pages are read, too.
    """
    at, size, shape = store.layer(number, layer), store.layout.group_tokens, store.shape
    blocks = range(tokens // store.layout.block_tokens)
    store.read(at.index_pages.reshape(-1), store.pages.index_keys(at.index_tags, layer, blocks).reshape(-1))
    groups = range(tokens // size)
    pages = at.token_pages[:, : len(groups)].reshape(-1)
    read = store.read(pages, store.pages.token_keys(at.token_tags[: len(groups)], layer, groups).reshape(-1))
    kv = store.pages.values(read.data).reshape(2, shape.kv_heads, -1, shape.dim)
    last = np.stack([at.suffix_k, at.suffix_v])[:, :, at.suffix_k.shape[1] - tokens % size :]
    return np.concatenate([kv, last], axis=2)


assert journal_path(Path(_KV)).name.startswith(_KV)  # beside it, and copied with it
