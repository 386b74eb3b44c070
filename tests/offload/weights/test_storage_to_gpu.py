"""Ranges that are asked of kvikio, and which path is chosen. The stand-in reads the same files into host memory."""

import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from nearflash.abi.errors import WeightsError
from nearflash.offload.tiers.link import DeviceLink, host_memory
from nearflash.offload.weights.layout import BufferLayout, LayoutReader
from nearflash.offload.weights.storage_to_gpu import DirectReader, choose_reader
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.sources import Source, SourcePiece

GPU = SimpleNamespace(device=torch.device("cuda"))


class HostFile:
    """CuFile's pread and close, into a tensor of the host; `short` bytes are left out."""

    opened, short = [], 0

    def __init__(self, path, flags):
        assert flags == "r"
        self.descriptor = os.open(path, os.O_RDONLY)
        self.opened.append(self)

    def pread(self, buffer, size, file_offset):
        data = os.pread(self.descriptor, size - self.short, file_offset)
        buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return SimpleNamespace(get=lambda: len(data))

    def close(self):
        os.close(self.descriptor)
        self.opened.remove(self)


@pytest.fixture
def kvikio(monkeypatch):
    monkeypatch.setattr(HostFile, "opened", [])
    yield SimpleNamespace(CuFile=HostFile)
    assert not HostFile.opened


@pytest.fixture
def layout(tmp_path):
    generator = torch.Generator().manual_seed(1)
    shapes = ((7, 5), (64, 64), (130, 17), (64, 33))
    values = {f"t{n}": torch.randn(shape, generator=generator).bfloat16() for n, shape in enumerate(shapes)}
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    sources = {name: Source(name, each.shape, torch.bfloat16, (SourcePiece(each),)) for name, each in found.items()}
    return BufferLayout(sources), values


def test_layers_are_those_of_the_pinned_path(layout, kvikio):
    places, values = layout
    direct, pinned = (host_memory(places.size_bytes) for _ in range(2))
    reader, other = DirectReader(kvikio), LayoutReader()
    try:
        assert reader.takes(places)
        assert reader.read_runs(places, direct) == other.read_runs(places, pinned)
        reader.read_runs(places, direct)
        assert len(HostFile.opened) == 1
    finally:
        reader.close()
        other.close()
    for name, value in values.items():
        assert torch.equal(places.views(direct)[name], value) and torch.equal(places.views(pinned)[name], value)


def test_a_file_that_is_short_or_changed_is_an_error(layout, kvikio, tmp_path, monkeypatch):
    places, memory = layout[0], host_memory(layout[0].size_bytes)
    reader = DirectReader(kvikio)
    try:
        monkeypatch.setattr(HostFile, "short", 3)
        with pytest.raises(WeightsError, match=r"model\.safetensors: tensor 't\d', .*ends 3 bytes too early"):
            reader.read_runs(places, memory)
        monkeypatch.setattr(HostFile, "short", 0)
        os.utime(tmp_path / "model.safetensors", ns=(1, 1))
        with pytest.raises(WeightsError, match="was changed while it was in use"):
            reader.read_runs(places, memory)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("available", "direct", "expected"),
    [
        (True, True, "into the GPU's memory, by cuFile"),
        (True, False, "through pinned memory, as reads are buffered"),
        (False, True, "as there is no GPUDirect Storage here"),
        (None, True, "as there is no kvikio (none)"),
    ],
)
def test_the_path_is_chosen_and_named(available, direct, expected):
    def load(name):
        if available is None:
            raise ImportError("none")
        return SimpleNamespace(get={"is_gds_available": available}.get, CuFile=HostFile)

    reader, sentence = choose_reader(GPU, direct, load)
    assert (reader is not None) is (available is True and direct)
    assert expected in sentence


def test_a_processor_has_no_path_to_a_gpu():
    assert choose_reader(DeviceLink("cpu"), True) == (None, "")
