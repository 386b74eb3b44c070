"""Subjects of the bench `fuzz`: weights, gradients on the wire, and what offloading keeps on disk for a while."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.bitmap import GROUP_END, HEADER_BYTES, SECTION_BYTES
from nearflash.abi.topk import (
    HEADER_BYTES as TOPK_HEADER_BYTES,
)
from nearflash.abi.topk import (
    INDEX_BYTES,
    TILE_PARAMS,
    WORD_BYTES,
    StreamHeader,
    ValueFormat,
    check_tiles,
    pad_bytes,
    unpack_tile_word,
)
from nearflash.bench.storage.fuzz.mutations import (
    FILE,
    Files,
    FuzzedFormat,
    Range,
    damage,
    forge_json,
    pieces,
    range_pieces,
)
from nearflash.device.backends.host import topk as host_topk
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.state.safetensors import encode_header
from nearflash.weights import PackedTensor, compress_tensor, expand, open_checkpoint, pack, quantize, write_file
from nearflash.weights.checkpoint import SINGLE, write_index
from nearflash.weights.coded import pack_coded
from nearflash.weights.compress import dense_tensor
from nearflash.weights.file import CHECKPOINT, WeightsTensor, read_file
from nearflash.weights.rans import pack_rans

__all__ = ["checkpoint", "matrix", "spill", "topk", "weights"]

_GROUP_ROWS, _BLOCK_ELEMENTS = 8, 400
_STREAMS = {"coded": "bitmap", "plain": "bitmap", "scaled8": "bitmap", "scaled4": "bitmap", "levels": "coded",
            "unpruned": "coded", "bytes": "rans"}  # fmt: skip
"""Forms of tensors in groups with checksums of their own."""


# Weights


def weights(folder: Path) -> FuzzedFormat:
    """A file with a tensor of every form, two of each; another one has the same tensors with other values."""
    files = []
    for number in range(2):
        packed = [tensor for salt in range(2) for tensor in _tensors(2 * number + salt, f"-{salt}")]
        write_file(folder / str(number), {tensor.name: (tensor.dtype, tensor.shape) for tensor in packed}, packed)
        files.append({FILE: (folder / str(number)).read_bytes()})
    tensors = read_file(folder / "0")

    def read(folder: Path) -> object:
        return _expand_all(read_file(folder / FILE))

    own = files[0]
    mixed = range_pieces(own, files[1:], lambda files: [*_ranges(files[FILE], tensors)], SECTION_BYTES)
    return FuzzedFormat(own, read, lambda rng: {FILE: _forge_weights(own[FILE], rng)}, mixed)


def _values(seed: int) -> NDArray[np.float16]:
    values = np.random.default_rng(5).standard_normal((24, 200)).astype(np.float16)
    values[np.abs(values) < 0.67] = 0
    return np.roll(values, 8 * seed, axis=0) * np.float16(1 + seed // 3)  # streams of the same size


def _draw_unpruned(seed: int) -> NDArray[np.uint16]:
    """Patterns of bf16 without a zero, of exponents that first codes of two bits are the best for."""
    words = np.random.default_rng(6).standard_normal((24, 200)).astype(np.float32).view(np.uint32) >> 16
    return np.roll(words.astype(np.uint16), 8 * seed, axis=0) + np.uint16(seed // 3)


def _tensors(seed: int, suffix: str) -> list[PackedTensor]:
    values = _values(seed)
    matrices = {
        "coded": pack(values, group_rows=_GROUP_ROWS), "plain": pack(values, coding="plain", group_rows=_GROUP_ROWS),
        "scaled8": pack(quantize(values, 8), group_rows=_GROUP_ROWS),
        "scaled4": pack(quantize(values, 4), group_rows=_GROUP_ROWS),
        "levels": pack_coded(values, block_elements=_BLOCK_ELEMENTS),
        "unpruned": pack_coded(_draw_unpruned(seed), block_elements=_BLOCK_ELEMENTS),
        "bytes": pack_rans((values * np.float16(4)).astype(np.int8), block_elements=_BLOCK_ELEMENTS),
    }  # fmt: skip
    dtypes = {"unpruned": "BF16", "bytes": ("F8_E4M3", "F8_E5M2")[seed % 2]}
    streams = [
        PackedTensor(
            name + suffix, dtypes.get(name, "F16"), values.shape, form, np.frombuffer(matrices[name], np.uint8)
        )
        for name, form in _STREAMS.items()
    ]
    codes = [compress_tensor(f"codes{bits}{suffix}", values, "groups", bits) for bits in (8, 4)]
    dense = dense_tensor(f"experts{suffix}", "F16", (4, 6, 200), values.view(np.uint8).ravel())
    return [*streams, *codes, dense]


def _expand_all(tensors: dict[str, WeightsTensor]) -> object:
    """The elements of every tensor; of one with rows of their own those, too."""
    values: dict[str, object] = {}
    for name, tensor in tensors.items():
        rows = [tensor.row(number) for number in range(len(tensor.row_checksums))]
        values[name] = tensor.dtype, tensor.shape, expand(tensor).tobytes(), [row.read().tobytes() for row in rows]
    return values


def _ranges(content: bytes, tensors: dict[str, WeightsTensor]) -> Iterator[Range]:
    """Bytes of every tensor, of every group of a stream, and of every row that has a checksum."""
    for tensor in tensors.values():
        start, stop = tensor.offset, tensor.offset + tensor.stored_bytes
        yield FILE, start, stop
        if tensor.form in _STREAMS.values():
            yield FILE, start, start + HEADER_BYTES
            yield from ((FILE, start + first, start + last) for first, last in _groups(content[start:stop]))
        for row in (tensor.row(number) for number in range(len(tensor.row_checksums))):
            yield FILE, row.offset, row.offset + row.stored_bytes


def _groups(stream: bytes) -> Iterator[tuple[int, int]]:
    at = len(stream)
    while at > HEADER_BYTES:
        first = at - SECTION_BYTES - int.from_bytes(stream[at - SECTION_BYTES + 8 : at - SECTION_BYTES + 16], "little")
        yield first, at
        at = first


def _forge_weights(content: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    kind = rng.choice(["header", "nearflash_tensors", "nearflash_rows", "stream"])
    if kind == "header":
        header = forge_json(header, rng)
    elif kind == "stream":
        _forge_stream(header, data, rng)
    else:
        metadata = header["__metadata__"]
        metadata[kind] = json.dumps(forge_json(json.loads(metadata[kind]), rng))
    size = length if kind == "stream" else 0  # as long as it was, so that streams begin at multiples of 64
    text = encode_header(header, size) if isinstance(header, dict) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def _forge_stream(header: Any, data: bytearray, rng: random.Random) -> None:
    """A stream with a byte changed, under the checksums of its group, its header and the file."""
    name = f"{rng.choice(list(_STREAMS))}-0"
    start, end = header[name]["data_offsets"]
    matrix = _forge_matrix(data[start:end], rng)
    data[start:end] = matrix
    described = json.loads(header["__metadata__"]["nearflash_tensors"])
    described[name]["header_crc32c"] = f"{int.from_bytes(matrix[HEADER_BYTES - 4 : HEADER_BYTES], 'little'):08x}"
    header["__metadata__"]["nearflash_tensors"] = json.dumps(described, separators=(",", ":"))


def _forge_matrix(matrix: bytearray, rng: random.Random) -> bytes:
    groups = sorted(_groups(bytes(matrix)))
    number = rng.randrange(len(groups))
    first, last = groups[number]
    at = rng.randrange(HEADER_BYTES - 4) if rng.random() < 0.5 else rng.randrange(first, last - SECTION_BYTES)
    matrix[at] = rng.randrange(256)
    body = np.frombuffer(bytes(matrix[first : last - SECTION_BYTES]), np.uint8)
    matrix[last - SECTION_BYTES : last - SECTION_BYTES + 8] = GROUP_END.pack(number, crc32c(body))[:8]
    if at >= HEADER_BYTES:
        ends = b"".join(matrix[stop - SECTION_BYTES : stop - SECTION_BYTES + 16] for _, stop in groups)
        matrix[36:40] = crc32c(np.frombuffer(ends, np.uint8)).to_bytes(4, "little")
    checksum = crc32c(np.frombuffer(bytes(matrix[: HEADER_BYTES - 4]), np.uint8))
    matrix[HEADER_BYTES - 4 : HEADER_BYTES] = checksum.to_bytes(4, "little")
    return bytes(matrix)


def checkpoint(folder: Path) -> FuzzedFormat:
    """A folder with two files and their index; another one is of another run, its tensors of the same names."""
    names = {f"model-{number}.safetensors": f"-{number}" for number in range(2)}
    folders: list[Files] = []
    for run in ("one", "two"):
        (folder / run).mkdir()
        places: dict[str, str] = {}
        for number, (file, suffix) in enumerate(names.items()):
            packed = _tensors(2 * len(folders) + number, suffix)
            planned = {tensor.name: (tensor.dtype, tensor.shape) for tensor in packed}
            write_file(folder / run / file, planned, packed, {CHECKPOINT: run})
            places |= dict.fromkeys(planned, file)
        write_index(folder / run, places, 0, run)
        folders.append({path.name: path.read_bytes() for path in (folder / run).iterdir()})
    own, index = folders[0], next(name for name in folders[0] if name not in names)

    def forge(rng: random.Random) -> Files:
        if rng.random() < 0.5:
            return {**own, index: json.dumps(forge_json(json.loads(own[index]), rng)).encode()}
        name = rng.choice(sorted(names))
        return {**own, name: _forge_weights(own[name].replace(names[name].encode(), b"-0"), rng)}

    def read(folder: Path) -> object:
        return _expand_all(open_checkpoint(folder))

    def accepts(content: Any, expected: Any) -> bool:
        """An index has no checksum: it may leave tensors out, which a model then misses by name."""
        return bool(content.items() <= expected.items())

    assert SINGLE not in own
    return FuzzedFormat(own, read, forge, pieces(own, folders[1:], SECTION_BYTES), accepts=accepts)


def matrix(folder: Path) -> FuzzedFormat:
    """A matrix as the kernel reads it, without a file around it."""
    own, *others = ({FILE: pack(_values(seed), group_rows=_GROUP_ROWS)} for seed in (0, 1, 2))

    def read(folder: Path) -> object:
        return expand((folder / FILE).read_bytes()).tobytes()

    def ranges(files: Files) -> Sequence[Range]:
        return [(FILE, 0, HEADER_BYTES), *((FILE, first, last) for first, last in _groups(files[FILE]))]

    def forge(rng: random.Random) -> Files:
        return {FILE: _forge_matrix(bytearray(own[FILE]), rng)}

    return FuzzedFormat(own, read, forge, range_pieces(own, others, ranges, SECTION_BYTES))


# Gradients


def topk(folder: Path) -> FuzzedFormat:
    """A stream of gradients in three tiles; others have the same places with other values, or other places."""
    params, files = 2 * TILE_PARAMS + 500, []
    for seed, place_seed in ((0, 0), (1, 0), (2, 1)):
        indices = np.sort(np.random.default_rng(place_seed).choice(params, 300, replace=False)).astype(np.int64)
        values = np.random.default_rng(seed).standard_normal(300).astype(np.float32)
        bits = host_topk.encode_values(values, ValueFormat.FP16)
        files.append({FILE: host_topk.pack(indices, bits, params, ValueFormat.FP16).tobytes()})
    own = files[0]

    def read(folder: Path) -> object:
        stream = np.fromfile(folder / FILE, np.uint8)
        check_tiles(stream.data, StreamHeader.unpack(stream[:TOPK_HEADER_BYTES].tobytes(), params, stream.size))
        return host_topk.expand(stream, params).tobytes()

    def ranges(files: Files) -> Sequence[Range]:
        parts, at = [(FILE, 0, TOPK_HEADER_BYTES)], TOPK_HEADER_BYTES
        while at < len(files[FILE]):
            count, _ = unpack_tile_word(files[FILE][at : at + WORD_BYTES])
            end = at + WORD_BYTES + 2 * pad_bytes(count, INDEX_BYTES)
            parts.append((FILE, at, end))
            at = end
        return parts

    def forge(rng: random.Random) -> Files:
        data = bytearray(own[FILE])
        data[rng.randrange(TOPK_HEADER_BYTES - 4)] = rng.randrange(256)
        data[28:32] = crc32c(np.frombuffer(bytes(data[:28]), np.uint8)).to_bytes(4, "little")
        return {FILE: bytes(data)}

    return FuzzedFormat(own, read, forge, range_pieces(own, files[1:], ranges, WORD_BYTES))


# Offloading


def spill(folder: Path) -> FuzzedFormat:
    """Keys and values of two layers, and hidden states, on disk for a while: a file without a name in a run."""
    import torch

    from nearflash.offload.cache.kv_storage import DiskStorage, KvForm
    from nearflash.offload.tiers.activations import Parked, StatesFile
    from nearflash.offload.tiers.ledger import Ledger
    from nearflash.offload.tiers.link import DeviceLink, host_memory

    form = KvForm(2, 2, 300, 64, torch.bfloat16)
    size, states_bytes = DiskStorage.rest_bytes(form), 4 * BLOCK_BYTES
    file = DirectFile.create(folder / "scratch", 2 * size + states_bytes, direct=False)
    storages = [DiskStorage(form, file, offset, Ledger(), f"layer {offset // size}") for offset in (0, size)]
    memory, content = host_memory(DiskStorage.work_bytes(form)), host_memory(2 * size + states_bytes).numpy()
    hidden = torch.randn(2, 16, 64)
    for storage in storages:
        storage.states(memory)[:] = torch.randn(storage.states(memory).shape).bfloat16()
        storage.store(memory, 0, form.tokens)

    def park() -> tuple[Parked, torch.Tensor]:
        places = StatesFile(file, DeviceLink(), Ledger(), overlap=False)
        waiting, states = Parked("disk", DeviceLink(), places, 2 * size, states_bytes), hidden.clone()
        waiting.park(states)
        return waiting, states

    def read(folder: Path) -> object:
        waiting, states = park()
        data = np.fromfile(folder / FILE, np.uint8)[: len(content)]
        content[:] = 0
        content[: len(data)] = data
        file.write(0, content)
        content_read = []
        for storage in storages:
            memory[:] = 0
            storage.load(memory, 0, form.tokens)
            content_read.append(storage.states(memory).contiguous().view(torch.uint8).numpy().tobytes())
        waiting.restore()
        return [*content_read, states.numpy().tobytes()]

    park()
    file.read(0, content)
    files = {FILE: content.tobytes()}
    return FuzzedFormat(files, read, lambda rng: damage(files, rng), pieces(files, [], BLOCK_BYTES))
