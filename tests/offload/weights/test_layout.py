"""A layer's parameters read straight into one buffer, however its file is laid out."""

import itertools
import os
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nearflash.abi.errors import WeightsError
from nearflash.offload.tiers.link import host_memory
from nearflash.offload.weights.layout import BufferLayout, FileRun, LayoutReader, read_run
from nearflash.storage.io.unchanged import UnchangedFile
from nearflash.verify.fixtures.files import rot
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.file import PackedTensor, write_file
from nearflash.weights.sources import Source, SourcePiece
from nearflash.weights.weights_map import KeptTensor


def tensors(seed=1, dtype=torch.bfloat16, shapes=((7, 5), (64, 64), (3,), (130, 17), (1,), (64, 33))):
    generator = torch.Generator().manual_seed(seed)
    return {f"t{n}": torch.randn(shape, generator=generator).to(dtype) for n, shape in enumerate(shapes)}


def source(found, name, dtype=None):
    tensor = found[name]
    own = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}[tensor.dtype]
    return Source(name, tensor.shape, dtype or own, (SourcePiece(tensor),))


def filled(layout, direct=True):
    memory = host_memory(layout.size_bytes)
    memory.fill_(0xA5)
    reader = LayoutReader(direct)
    try:
        with reader.begin(layout) as reads:
            moved = reader.read_runs(layout, memory), reader.expand(layout, memory, reads)
    finally:
        reader.close()
    return layout.views(memory), moved


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_tensors_of_a_file(tmp_path, direct, dtype):
    values = tensors(dtype=dtype)
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    layout = BufferLayout({name: source(found, name) for name in found})
    views, (read, expanded) = filled(layout, direct)
    assert all(torch.equal(views[name], value) for name, value in values.items())
    assert len(layout.runs) == 1 and not layout.expanded and expanded == 0
    stored = sum(value.numel() * value.element_size() for value in values.values())
    assert stored <= read < stored + 4096


def test_some_tensors_of_several_files(tmp_path):
    """What lies between two wanted ones is read with them only where it is small."""
    one = {"a": torch.randn(64, 64), "b": torch.randn(512, 512), "c": torch.randn(9, 9)}
    save_file(one, tmp_path / "one.safetensors")
    save_file({"d": torch.randn(40, 3)}, tmp_path / "two.safetensors")
    found = open_checkpoint(tmp_path / "one.safetensors") | open_checkpoint(tmp_path / "two.safetensors")
    wanted = {name: source(found, name) for name in ("a", "c", "d")}
    far = BufferLayout(wanted)
    assert len(far.runs) == 3, "b is a MiB"
    near = BufferLayout(wanted, gap_bytes=2 << 20)
    assert len(near.runs) == 2
    for layout in (far, near):
        views, _ = filled(layout)
        assert torch.equal(views["a"], one["a"]) and torch.equal(views["c"], one["c"])
        assert views["d"].shape == (40, 3)
    assert far.size_bytes < near.size_bytes


def test_views_do_not_overlap_and_stay_inside(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    layout = BufferLayout({name: source(found, name) for name in found})
    memory = host_memory(layout.size_bytes)
    start = memory.data_ptr()
    spans = sorted((v.data_ptr() - start, v.numel() * v.element_size()) for v in layout.views(memory).values())
    assert all(place + size <= after for (place, size), (after, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= layout.size_bytes and layout.size_bytes % 4096 == 0


def test_another_dtype_is_converted(tmp_path):
    values = tensors(dtype=torch.float16)
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    layout = BufferLayout({name: source(found, name, torch.float32) for name in found})
    assert not layout.runs and set(layout.expanded) == set(values)
    views, (read, expanded) = filled(layout)
    assert read == 0 and expanded == sum(2 * value.numel() for value in values.values())
    assert all(torch.equal(views[name], value.float()) for name, value in values.items())


def test_tensors_in_memory_are_not_read(tmp_path):
    values = tensors()
    save_file(values, tmp_path / "model.safetensors")
    found = {name: KeptTensor(tensor) for name, tensor in open_checkpoint(tmp_path).items()}
    (tmp_path / "model.safetensors").unlink()
    layout = BufferLayout({name: source(found, name) for name in found})
    views, _ = filled(layout)
    assert all(torch.equal(views[name], value) for name, value in values.items())


def test_a_long_run_is_read_in_parts(tmp_path):
    value = torch.from_numpy(np.random.default_rng(1).integers(0, 2**15, (5000, 4000), np.int16)).view(torch.bfloat16)
    save_file({"big": value}, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    layout = BufferLayout({"big": source(found, "big")})
    parts = list(layout.runs[0].parts())
    assert len(parts) == 3 and sum(part.size_bytes for part in parts) == layout.runs[0].size_bytes
    assert all(part.offset % 4096 == 0 and part.buffer_offset % 4096 == 0 for part in parts)
    views, _ = filled(layout)
    assert torch.equal(views["big"].view(torch.int16), value.view(torch.int16))


def test_an_empty_layout_needs_nothing():
    layout = BufferLayout({})
    assert layout.size_bytes == 0 and layout.stored_bytes == 0
    assert filled(layout) == ({}, (0, 0))


def test_a_file_that_ends_too_early(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10_000))
    file, memory = UnchangedFile(tmp_path / "file"), host_memory(16384)
    read_run(FileRun(file, 0, 10_000, 0, "t"), memory)
    read_run(FileRun(file, 8192, 10_000 - 8192, 4096, "t"), memory)
    for offset, size in ((0, 10_001), (8192, 4096), (16384, 1)):
        with pytest.raises(WeightsError, match=r"tensor 't', at byte \d+.*the file ends \d+ bytes too early"):
            read_run(FileRun(file, offset, size, 0, "t"), memory)


def test_no_part_is_still_being_read_when_another_ones_error_is_raised(tmp_path, monkeypatch):
    """The buffer was used again, and the slower part came into it."""
    save_file({"a": torch.randn(9 << 20)}, tmp_path / "model.safetensors")
    layout, ended = BufferLayout({"a": source(open_checkpoint(tmp_path), "a")}), []

    def read(part, *_):
        if part.buffer_offset == 0:
            raise WeightsError("the first part")
        time.sleep(0.1)
        ended.append(part.buffer_offset)

    monkeypatch.setattr("nearflash.offload.weights.layout.read_run", read)
    reader = LayoutReader()
    with pytest.raises(WeightsError, match="the first part"):
        reader.read_runs(layout, host_memory(layout.size_bytes))
    assert len(ended) == 2
    reader.close()


@pytest.mark.parametrize("change", ["written", "cut", "longer"])
def test_a_file_that_changes_after_it_was_opened_is_an_error(tmp_path, change):
    """A checkpoint that was written to during a run gave a mixture of two models."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    run, memory = FileRun(UnchangedFile(path), 0, 4096, 0, "t"), host_memory(4096)
    read_run(run, memory)
    if change == "written":
        with path.open("r+b") as out:
            out.write(b"1")
    else:
        os.truncate(path, 100 if change == "cut" else 9000)
    with pytest.raises(WeightsError, match=r"reading 't' failed .it was changed while it was in use; start again"):
        read_run(run, memory)


def test_a_file_whose_name_goes_to_another_one_is_read_to_its_end(tmp_path):
    (tmp_path / "file").write_bytes(b"\1" * 8192)
    run, memory = FileRun(UnchangedFile(tmp_path / "file"), 4096, 4096, 0, "t"), host_memory(4096)
    (tmp_path / "other").write_bytes(b"\2" * 8192)
    (tmp_path / "other").rename(tmp_path / "file")
    read_run(run, memory)
    assert bool((memory == 1).all())


def checksummed(folder, values):
    """A file of dense tensors with checksums, as compressed checkpoints have them."""
    numbers = {name: value.contiguous().view(torch.uint8).numpy().reshape(-1) for name, value in values.items()}
    planned = {name: ("F32", tuple(value.shape)) for name, value in values.items()}
    packed = [PackedTensor(name, "F32", tuple(values[name].shape), "dense", data) for name, data in numbers.items()]
    write_file(folder / "model.safetensors", planned, packed)
    return open_checkpoint(folder)


def damage(folder, at):
    """Change the byte at an offset of the file."""
    path = folder / "model.safetensors"
    rot(path, bytes([path.read_bytes()[at] ^ 1]), at)


def test_tensors_with_checksums_are_read_in_place(tmp_path):
    """They were read into another buffer, one open file each, and copied: 2.4 times the time of a decode step."""
    values = tensors(dtype=torch.float32)
    found = checksummed(tmp_path, values)
    assert all(tensor.checksum is not None for tensor in found.values())
    layout = BufferLayout({name: source(found, name) for name in found})
    views, (_, expanded) = filled(layout)
    assert not layout.expanded and expanded == 0
    assert all(torch.equal(views[name], value) for name, value in values.items())


@pytest.mark.parametrize("name", ["t0", "t1", "t5"])
def test_damage_in_what_is_read_in_place_is_an_error(tmp_path, name):
    found = checksummed(tmp_path, tensors(dtype=torch.float32))
    damage(tmp_path, found[name].offset + found[name].stored_bytes - 1)
    layout = BufferLayout({each: source(found, each) for each in found})
    with pytest.raises(WeightsError, match=rf"tensor '{name}', at byte {found[name].offset}: it is damaged"):
        filled(layout)


def pieces(found, name, shape, places, dtype=torch.bfloat16):
    """A fused parameter of tensors `name`0, `name`1, … in their places."""
    own = [SourcePiece(found[f"{name}{number}"], place) for number, place in enumerate(places)]
    return Source(name, shape, dtype, tuple(own))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 1000, 2048])
def test_pieces_of_a_fused_parameter_are_read_into_their_places(tmp_path, direct, shift):
    """Experts' matrices of whole blocks, wherever the file's tensors begin in a block; beside one in a run."""
    values = {"0": torch.randn(shift + 1, 2).bfloat16()}
    values |= {f"up{n}": torch.randn(64, 64).bfloat16() for n in range(4)}
    values |= {f"down{n}": torch.randn(128, 32).bfloat16() for n in range(2)} | {"z": torch.randn(3, 5).bfloat16()}
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    up = pieces(found, "up", (2, 128, 64), [(0, slice(0, 64)), (0, slice(64, 128)), (1, slice(0, 64)),
                                            (1, slice(64, 128))])  # fmt: skip
    down = pieces(found, "down", (2, 128, 32), [(0, slice(0, 128)), (1, slice(0, 128))])
    layout = BufferLayout({"up": up, "z": source(found, "z"), "down": down})
    assert not layout.expanded and sum(run.exact for run in layout.runs) == 6
    views, (read, expanded) = filled(layout, direct)
    assert torch.equal(views["up"].flatten(0, 1), torch.cat([values[f"up{n}"] for n in range(4)]))
    assert torch.equal(views["down"], torch.stack([values["down0"], values["down1"]]))
    assert torch.equal(views["z"], values["z"])
    assert expanded == 0 and read >= 6 * 8192


def test_a_piece_writes_no_byte_beside_its_own(tmp_path):
    content = np.random.default_rng(1).integers(0, 256, 40_000, np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    file = UnchangedFile(tmp_path / "file")
    for offset, size in ((0, 8192), (5, 1), (100, 3996), (4000, 200), (4090, 20_000), (8192, 4097), (4095, 35_905)):
        memory = host_memory(65536)
        memory.fill_(0xA5)
        place = 8192 + offset % 4096
        for part in FileRun(file, offset, size, place, "t", exact=True).parts():
            read_run(part, memory)
        expected = np.full(65536, 0xA5, np.uint8)
        expected[place : place + size] = content[offset : offset + size]
        assert np.array_equal(memory.numpy(), expected), (offset, size)
    with pytest.raises(WeightsError, match="the file ends 1 bytes too early"):
        read_run(FileRun(file, 39_000, 1001, 39_000 % 4096, "t", exact=True), host_memory(65536))


def test_pieces_that_lie_otherwise_in_their_blocks_are_copied(tmp_path):
    """Of odd sizes, or of columns: direct I/O cannot put them there."""
    values = {f"odd{n}": torch.randn(5, 64).bfloat16() for n in range(2)}
    values |= {f"wide{n}": torch.randn(64, 32).bfloat16() for n in range(2)}
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    odd = pieces(found, "odd", (10, 64), [(slice(5, 10),), (slice(0, 5),)])
    wide = pieces(found, "wide", (64, 64), [(slice(0, 64), slice(0, 32)), (slice(0, 64), slice(32, 64))])
    layout = BufferLayout({"odd": odd, "wide": wide})
    assert set(layout.expanded) == {"odd", "wide"} and not layout.runs
    views, _ = filled(layout)
    assert torch.equal(views["odd"], torch.cat([values["odd1"], values["odd0"]]))
    assert torch.equal(views["wide"], torch.cat([values["wide0"], values["wide1"]], 1))


def test_a_damaged_piece_is_found(tmp_path):
    found = checksummed(tmp_path, {f"up{n}": torch.randn(64, 64) for n in range(2)})
    places = [(slice(0, 64),), (slice(64, 128),)]
    sources = {"up": pieces(found, "up", (128, 64), places, torch.float32)}
    whole = BufferLayout(sources)
    assert [run.exact for run in whole.runs] == [True, True]
    filled(whole)
    damage(tmp_path, found["up1"].offset + 77)
    layout = BufferLayout(sources)
    for _ in range(2):
        with pytest.raises(WeightsError, match=r"tensor 'up1', at byte \d+: it is damaged"):
            filled(layout)
    filled(whole)  # was found right before, and is not checked at every visit
