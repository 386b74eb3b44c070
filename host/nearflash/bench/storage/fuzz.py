"""The bench `fuzz`: files that are damaged, and files that are forged under checksums that hold.

A damaged file must give what it held before, a documented warning, or a named error. A forged one is well-formed or
gives a named error: one that is well-formed holds what the forger wrote, which no checksum can tell.
"""

import json
import random
import signal
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import numpy as np

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, SECTION_BYTES
from nearflash.abi.errors import CommandError, LostStepWarning, NearflashError, UncheckedWarning
from nearflash.bench.options import Option
from nearflash.bench.storage.history import Oracle
from nearflash.bench.storage.kv_crashes import GEOMETRY, LAYOUT, SHAPE
from nearflash.device import open_device
from nearflash.device.replay import RecordingDevice, ReplayDevice, sealed_line
from nearflash.inference.policy.files import PolicyFile
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage import StateStore
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.io.backend import BLOCK_BYTES, PositionalBackend
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.sealed import seal, unseal
from nearflash.storage.kv import KvLayout, KvShape, KvStore
from nearflash.storage.kv.journal import SequenceJournal
from nearflash.storage.kv.sequence import Tags
from nearflash.storage.state.exchange import export_state, import_state
from nearflash.storage.state.safetensors import checked_header
from nearflash.weights import compress_tensor, expand, read_file, write_file
from nearflash.weights.compress import dense_tensor

__all__ = ["run"]

HANG_S = 20
STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 1 << 40, 10**400, "", "p", "\ud800", [], {}, [[]], [0] * 5, {"p": []}, float("nan"),
)  # fmt: skip
_Text = Callable[[bytes, random.Random], bytes]


@dataclass
class Subject:
    """A file format: an intact file, how it is read (to a value that tells all its content), and how it is forged."""

    content: bytes
    read: Callable[[Path], object]
    forge: _Text
    older: tuple[object, ...] = ()
    """What it may be read as, too: states of before, where the end of a file may be lost."""
    sealed: bool = True
    """It carries checksums; without them a damaged file that is well-formed counts as forged."""


class _HungError(Exception):
    """Reading took longer than HANG_S."""


def run(
    mutations: Annotated[int, Option("Mutations of each format.", int, metavar="N")] = 6000,
    formats: Annotated[Collection[str] | None, Option("Of these formats (default: all).", many=True)] = None,
) -> Iterator[dict[str, Any]]:
    """A row a format, and one of all; what went wrong goes to standard error. Raises CommandError for other formats."""
    if unknown := set(formats or ()) - FORMATS.keys():
        raise CommandError(f"formats must be of {', '.join(FORMATS)}, not {', '.join(sorted(unknown))}")
    total: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="nearflash-fuzz-") as folder:
        for name, make in FORMATS.items():
            if formats and name not in formats:
                continue
            place = Path(folder) / name
            place.mkdir()
            counts = _fuzz(name, make(place), place / "mutated", mutations)
            total = {key: total.get(key, 0) + value for key, value in counts.items()}
            yield {"format": name, **counts}
    yield {"format": "all", **total}


def _fuzz(name: str, subject: Subject, path: Path, mutations: int) -> dict[str, int]:
    rng = random.Random(name)
    names = ("mutations", "forged", "same", "warned", "rejected", "forged_well_formed", "raw_errors", "silent", "hangs")
    counts = dict.fromkeys(names, 0)
    path.write_bytes(subject.content)
    expected = subject.read(path)
    for number in range(mutations):
        forged = number % 2 == 1
        content = (subject.forge if forged else _damage)(subject.content, rng)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        counts["mutations"] += 1
        counts["forged"] += forged
        outcome, detail = _outcome(subject, path, expected)
        if outcome == "silent" and (forged or not subject.sealed):
            outcome = "forged_well_formed"
        counts[outcome] += 1
        if outcome in ("raw_errors", "silent", "hangs"):
            print(f"{name}, mutation {number}: {outcome}: {detail}", file=sys.stderr)
    return counts


def _outcome(subject: Subject, path: Path, expected: object) -> tuple[str, str]:
    def hung(number: int, frame: FrameType | None) -> None:
        raise _HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANG_S)
    try:
        with warnings.catch_warnings(record=True) as noticed:
            warnings.simplefilter("always")
            found = subject.read(path)
    except _HungError:
        return "hangs", ""
    except NearflashError:
        return "rejected", ""
    except BaseException as error:
        return "raw_errors", repr(error)[:200]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if any(issubclass(each.category, (LostStepWarning, UncheckedWarning)) for each in noticed):
        return "warned", ""
    return ("same", "") if found == expected or found in subject.older else ("silent", "another content")


# Mutations


def _damage(content: bytes, rng: random.Random) -> bytes:
    """Some bits or bytes changed, a span of zeros, or an end that is missing or too much."""
    data = bytearray(content)
    # Half of them near the beginning, where headers are.
    limit = len(data) if rng.random() < 0.5 else min(len(data), 4 * BLOCK_BYTES)
    match rng.randrange(6):
        case 0:
            return bytes(data[: rng.randrange(len(data))])
        case 1:
            return bytes(data) + rng.randbytes(rng.choice([1, 8, BLOCK_BYTES]))
        case 2:
            start = rng.randrange(limit)
            data[start : start + 512] = bytes(min(512, len(data) - start))
        case _:
            for _ in range(rng.choice([1, 1, 1, 4])):
                data[rng.randrange(limit)] ^= 1 << rng.randrange(8)
    return bytes(data)


def _forged_json(body: Any, rng: random.Random) -> Any:
    """The value with one of its parts replaced, taken away, or doubled."""
    body = json.loads(json.dumps(body))
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(body)
    if not places or rng.random() < 0.02:
        return rng.choice(STRANGE[:-1])
    node, key = rng.choice(places)
    if rng.random() < 0.2:
        del node[key]
    elif rng.random() < 0.2 and isinstance(node, list):
        node.append(node[key])
    elif rng.random() < 0.3 and type(node[key]) is int:
        node[key] = max(0, node[key] + rng.choice([-1, 1, 32, 1024, 1 << 33]))
    else:
        node[key] = rng.choice(STRANGE)
    return body


def _sealed(kind: str, body: Any, room: int) -> bytes | None:
    try:
        block: bytes = seal(kind, body, room).tobytes()
    except (NearflashError, ValueError):
        return None
    return block


# Formats


def _state(folder: Path) -> Subject:
    oracle, path = Oracle(), folder / "state"
    with oracle.create(StateStore, [path], PositionalBackend()) as store:
        for step in range(3):
            oracle.write(store, (step + 1, 0))
            oracle.commit(store, (step + 1, 0))

    def read(path: Path) -> object:
        with StateStore.open(path, direct=False) as store:
            arrays = [store.read_array(array.name).tobytes() for array in store.manifest.arrays]
            return store.stamp, store.tensor_steps, store.metadata, store.manifest, arrays

    def forge(content: bytes, rng: random.Random) -> bytes:
        data = bytearray(content)
        superblocks = [unseal("superblock", _block(data, slot * BLOCK_BYTES, BLOCK_BYTES)) for slot in (0, 1)]
        kind, slot = rng.choice(["superblock", "manifest", "table"]), rng.randrange(2)
        if kind == "superblock":
            if block := _sealed(kind, _forged_json(superblocks[slot], rng), BLOCK_BYTES):
                data[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = block
            return bytes(data)
        start = 2 * BLOCK_BYTES
        if kind == "table":
            starts = [at for at in range(start, len(data), BLOCK_BYTES) if data[at:].startswith(b"nearflash.table")]
            start = starts[slot]
        size = superblocks[slot][f"{kind}_bytes"]
        block = _sealed(kind, _forged_json(unseal(kind, _block(data, start, size)), rng), size)
        if block is not None:
            data[start : start + len(block)] = block
            for number in (0, 1) if kind == "manifest" else (slot,):
                body = superblocks[number] | {f"{kind}_crc32c": crc32c(np.frombuffer(block, np.uint8))}
                data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] = (
                    _sealed("superblock", body, BLOCK_BYTES) or b""
                )
        return bytes(data)

    return Subject(path.read_bytes(), read, forge)


def _block(data: bytearray, start: int, size: int) -> Any:
    return np.frombuffer(bytes(data[start : start + size]), np.uint8)


def _export(folder: Path) -> Subject:
    path, state = folder / "export", _state(folder)
    (folder / "source").write_bytes(state.content)
    with StateStore.open(folder / "source", direct=False) as store:
        export_state(store, path)

    def read(path: Path) -> object:
        target = folder / "imported"
        target.unlink(missing_ok=True)
        with import_state(path, [target], direct=False) as store:
            arrays = [store.read_array(array.name) for array in store.manifest.arrays]
            parts = [  # without the padding between tensors, which an export does not hold
                whole[t.start // a.params_per_element :][: a.size_bytes(t.params) // a.element_bytes].tobytes()
                for a, whole in zip(store.manifest.arrays, arrays, strict=True)
                for t in store.manifest.tensors
            ]
            return store.profile, store.steps, store.tensor_steps, store.metadata, store.manifest, parts

    def forge(content: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        metadata = header["__metadata__"]
        if rng.random() < 0.5:
            metadata["nearflash"] = json.dumps(_forged_json(json.loads(metadata["nearflash"]), rng))
        else:
            header = _forged_json(header, rng)
        text = checked_header(header) if isinstance(header, dict) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + length :]

    return Subject(path.read_bytes(), read, forge)


def _flash(folder: Path) -> Subject:
    path, rng = folder / "flash", np.random.default_rng(1)
    with KvStore(FileFlash.create(path, GEOMETRY, direct=False), SHAPE, LAYOUT) as store:
        sequence = store.add()
        size = (2, SHAPE.kv_heads, 96, SHAPE.dim)
        store.append(sequence, 0, *rng.standard_normal(size, dtype=np.float32).astype(np.float16))
        keys = store.pages.token_keys(sequence, 0, range(6)).reshape(-1)
        pages = store.layer(sequence, 0).token_pages.reshape(-1)

    def read(path: Path) -> object:
        with FileFlash.open(path, direct=False) as flash:
            return flash.geometry, flash.about, flash.read(pages, keys).data.tobytes()

    def forge(content: bytes, rng: random.Random) -> bytes:
        body = unseal("flash", _block(bytearray(content), 0, BLOCK_BYTES))
        block = _sealed("flash", _forged_json(body, rng), BLOCK_BYTES)
        return content if block is None else block + content[BLOCK_BYTES:]

    return Subject(path.read_bytes(), read, forge)


def _transcript(folder: Path) -> Subject:
    path = folder / "transcript"

    def calls(device: Any) -> object:
        with device:
            buffer = device.allocate(BLOCK_BYTES)
            buffer.host[:] = 7
            buffer.sync_to_device()
            buffer.sync_from_device()
            address, content = buffer.address, buffer.host.tobytes()
            device.free(buffer)
            return address, content

    calls(RecordingDevice(open_device("model:update-tiny"), path))

    def forge(content: bytes, rng: random.Random) -> bytes:
        lines = [json.loads(line) for line in content.decode().splitlines()]
        number = rng.randrange(len(lines))
        body = {name: value for name, value in lines[number].items() if name != "crc32"}
        forged = _forged_json(body, rng)
        texts = content.decode().splitlines()
        texts[number] = sealed_line(forged) if isinstance(forged, dict) else json.dumps(forged)
        return "\n".join(texts).encode("ascii", "replace")

    return Subject(path.read_bytes(), lambda path: calls(ReplayDevice(path, "update-tiny")), forge)


def _journal(folder: Path) -> Subject:
    path, name = folder / "journal", "0" * 32
    journal = SequenceJournal.create(path, name)
    for sequence in range(3):
        journal.place(sequence, Tags((0,), (sequence,)), Tags((0,), (sequence,)))
        journal.note(sequence, {"tokens": [5, 6, 7], "text": "one"})
        journal.keep_partial_group(sequence, (23, 10 + sequence))
    journal.place(1, Tags((0, 2), (1, 4)), Tags((0, 1), (1, 4)))
    journal.keep_partial_group(1, None)
    journal.free(0)
    journal.close({1: (16, np.arange(3.0))})

    def read(path: Path) -> object:
        return repr(SequenceJournal.read(path, name))

    def forge(content: bytes, rng: random.Random) -> bytes:
        lines = content.splitlines()
        number = rng.randrange(len(lines))
        text = json.dumps(_forged_json(json.loads(lines[number][9:]), rng)).encode()
        lines[number] = b"%08x %b" % (zlib.crc32(text), text)
        return b"\n".join(lines) + b"\n"

    lines, older = path.read_bytes().splitlines(keepends=True), []
    for count in range(1, len(lines)):
        (folder / "older").write_bytes(b"".join(lines[:count]))
        older.append(read(folder / "older"))
    return Subject(path.read_bytes(), read, forge, tuple(older))


def _policy(folder: Path) -> Subject:
    shape, path = KvShape(3, 2, 64), folder / "policy.json"
    base = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=0.25, local_window=64, keep_tail=True)
    heads: dict[int | tuple[int, int], AttentionPolicy] = {}
    for layer, head in np.ndindex(shape.layers, shape.kv_heads):
        heads[layer, head] = replace(base, score_dims=8 + head, top_p=0.9)
    layout = KvLayout(16, True, 1024, IndexFormat.INT4, 4096)
    PolicyFile("a model", "0" * 16, replace(base, overrides=heads), layout, 0.12, 0.001, "by hand").write(path)

    def read(path: Path) -> object:
        return PolicyFile.read(path, shape, "0" * 16)

    def forge(content: bytes, rng: random.Random) -> bytes:
        return json.dumps(_forged_json(json.loads(content), rng)).encode()

    return Subject(path.read_bytes(), read, forge, sealed=False)


def _weights(folder: Path) -> Subject:
    path, values = folder / "weights", np.random.default_rng(1).standard_normal((24, 200)).astype(np.float16)
    values[np.abs(values) < 0.67] = 0
    packed = [
        compress_tensor("coded", values),
        compress_tensor("plain", values.view(np.uint16), "bitmap"),
        compress_tensor("scaled", values, bits=8),
        compress_tensor("codes", values, "groups", 4),
        dense_tensor("norm", "F32", (50,), np.arange(50, dtype=np.float32).view(np.uint8)),
    ]
    write_file(path, {each.name: (each.dtype, each.shape) for each in packed}, packed)

    def read(path: Path) -> object:
        return {name: (each.dtype, each.shape, expand(each).tobytes()) for name, each in read_file(path).items()}

    def forge(content: bytes, rng: random.Random) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
        kind = rng.choice(["header", "tensors", "stream"])
        if kind == "header":
            header = _forged_json(header, rng)
        elif kind == "tensors":
            metadata = header["__metadata__"]
            metadata["nearflash_tensors"] = json.dumps(_forged_json(json.loads(metadata["nearflash_tensors"]), rng))
        else:
            start, end = header[rng.choice(["coded", "plain", "scaled"])]["data_offsets"]
            data[start:end] = _forged_matrix(data[start:end], rng)
        text = checked_header(header) if isinstance(header, dict) else json.dumps(header).encode()
        text = text.ljust(length) if kind == "stream" else text
        return len(text).to_bytes(8, "little") + text + bytes(data)

    return Subject(path.read_bytes(), read, forge)


def _forged_matrix(matrix: bytearray, rng: random.Random) -> bytes:
    """A bitmap matrix of one group with a byte changed, under checksums that hold."""
    at = (
        rng.randrange(HEADER_BYTES - 4)
        if rng.random() < 0.5
        else rng.randrange(HEADER_BYTES, len(matrix) - SECTION_BYTES)
    )
    matrix[at] = rng.randrange(256)
    matrix[HEADER_BYTES - 4 : HEADER_BYTES] = crc32c(bytes(matrix[: HEADER_BYTES - 4])).to_bytes(4, "little")
    end = len(matrix) - SECTION_BYTES
    matrix[end:] = GROUP_END.pack(0, crc32c(bytes(matrix[HEADER_BYTES:end])))
    return bytes(matrix)


FORMATS: dict[str, Callable[[Path], Subject]] = {
    "state": _state, "export": _export, "flash": _flash, "transcript": _transcript, "journal": _journal,
    "policy": _policy, "weights": _weights,
}  # fmt: skip
