"""Stored bytes of compressed tensors are read while buffers are in use; what is not wanted gives its memory back."""

import threading
import time

import pytest
import torch

from nearflash.abi.errors import WeightsError
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.offload.weights.layer_weights import LayerWeights
from nearflash.offload.weights.staging import StagedReader
from nearflash.planning.policy import STAGED_TENSORS
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.compress import compress_tensor
from nearflash.weights.file import WeightsTensor, write_file
from nearflash.weights.sources import Source, SourcePiece

LAYERS, NAMES, SIDE = 4, "abcdef", 64


@pytest.fixture
def stack(tmp_path):
    """Modules without memory, the sources of their coded weights, and the values."""
    values = {f"{n}.{name}.weight": torch.randn(SIDE, SIDE).bfloat16() for n in range(LAYERS) for name in NAMES}
    packed = [
        compress_tensor(name, value.view(torch.int16).numpy().view("uint16"), "coded") for name, value in values.items()
    ]
    write_file(tmp_path / "model.safetensors", {each.name: (each.dtype, each.shape) for each in packed}, packed)
    found = open_checkpoint(tmp_path)
    with torch.device("meta"):
        modules = [
            torch.nn.ModuleDict({name: torch.nn.Linear(SIDE, SIDE, bias=False) for name in NAMES})
            for _ in range(LAYERS)
        ]
    sources = []
    for number in range(LAYERS):
        own = {name.partition(".")[2]: tensor for name, tensor in found.items() if name.startswith(f"{number}.")}
        sources.append({n: Source(n, t.shape, torch.bfloat16, (SourcePiece(t),)) for n, t in own.items()})
    return modules, sources, values


def check(stack, number):
    modules, _, values = stack
    for name, parameter in modules[number].named_parameters():
        assert torch.equal(parameter, values[f"{number}.{name}"]), (number, name)


@pytest.fixture
def loads(monkeypatch):
    """An event for each layer, set when the first of its tensors is read."""
    seen = {str(number): threading.Event() for number in range(LAYERS)}
    load = WeightsTensor.load

    def load_and_note(self, *args, **options):
        seen[self.name.partition(".")[0]].set()
        return load(self, *args, **options)

    monkeypatch.setattr(WeightsTensor, "load", load_and_note)
    return seen


def test_the_drive_does_not_wait_for_buffers(stack, loads):
    """Two buffers: layer 0 is computed with, layer 1 is expanded; layer 2 is read meanwhile, which has none yet."""
    modules, sources, _ = stack
    with LayerWeights(modules, sources, ["disk"] * LAYERS, link=DeviceLink(), ledger=Ledger()) as weights:
        with weights.use(0):
            assert loads["2"].wait(30), "layer 2 must be read while layer 0 is computed"
            assert not loads["3"].is_set()
            check(stack, 0)
        for number in (1, 2, 3, 0, 1, 2, 0, 3):
            with weights.use(number):
                check(stack, number)


def test_a_layer_that_is_never_used_gives_its_memory_back(stack):
    modules, sources, _ = stack
    ledger = Ledger()
    for _ in range(STAGED_TENSORS):
        with LayerWeights(modules, sources, ["disk"] * LAYERS, link=DeviceLink(), ledger=ledger) as weights:
            with weights.use(0):
                check(stack, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearflash-stage")]


@pytest.mark.parametrize(("tier", "staged"), [("disk", STAGED_TENSORS), ("host", 0)])
def test_stored_bytes_on_their_way_are_counted(stack, tier, staged):
    """As plans count them; what memory holds as it is stored needs no other place."""
    modules, sources, _ = stack
    ledger, sizes = Ledger(), [piece.tensor.stored_bytes for layer in sources for each in layer.values()
                               for piece in each.pieces]  # fmt: skip
    with LayerWeights(modules, sources, [tier] * LAYERS, link=DeviceLink(), ledger=ledger):
        kept = sum(source.stored_bytes for layer in sources for source in layer.values()) if tier == "host" else 0
        assert ledger.held["host"] == kept + staged * max(sizes)
    assert not any(ledger.held.values())


def test_reads_that_fail_or_are_dropped_release_their_stage(stack, monkeypatch):
    _, sources, _ = stack
    pieces = [(name, source.pieces[0]) for layer in sources for name, source in layer.items()]
    reader, load = StagedReader(threads=2), WeightsTensor.load

    def fail_once(self, *args, **options):
        if self.name == pieces[1][1].tensor.name:
            raise self.error("reading failed")
        return load(self, *args, **options)

    try:
        for _ in range(2):
            with reader.begin(pieces):
                pass
            with monkeypatch.context() as patched:
                patched.setattr(WeightsTensor, "load", fail_once)
                with pytest.raises(WeightsError, match=r"'0\.b\.weight'.*failed"), reader.begin(pieces) as reads:
                    for staged in reads:
                        staged.release()
        with reader.begin(pieces) as reads:
            found = [staged.release() for staged in reads]
        assert len(found) == len(pieces)
    finally:
        reader.close()


def test_a_read_may_be_overtaken(stack, monkeypatch):
    """By as many later ones as there are stages: whoever waited for it first would wait for ever."""
    _, sources, _ = stack
    pieces = [(name, source.pieces[0]) for layer in sources for name, source in layer.items()]
    reader, begun, overtaken = StagedReader(threads=2), threading.Event(), threading.Event()
    acquire = reader._stages.acquire

    def acquire_late(prefer=None):
        if not begun.is_set():
            begun.set()
            while not reader._stages.is_empty:
                time.sleep(0.001)
            overtaken.set()
        return acquire(prefer)

    monkeypatch.setattr(reader._stages, "acquire", acquire_late)
    try:
        with reader.begin(pieces) as reads:
            assert overtaken.wait(30)
            names = [(staged.piece.tensor.name, staged.release())[0] for staged in reads]
    finally:
        reader.close()
    assert names[0] != pieces[0][1].tensor.name and len(set(names)) == len(pieces)
