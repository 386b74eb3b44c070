"""Layers have their weights when they are used, and only then, whatever the order of visits."""

import threading

import pytest
import torch
from safetensors.torch import save_file

from nearflash.abi.errors import CommandError
from nearflash.offload.tiers.ledger import Budgets, Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.offload.weights.layer_weights import LayerWeights
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.sources import Source, SourcePiece

COUNT = 6


@pytest.fixture
def stack(tmp_path):
    """Modules without memory, their sources, and the values."""
    values = {
        f"{number}.{name}": torch.randn(shape)
        for number in range(COUNT)
        for name, shape in (("up.weight", (48, 32)), ("up.bias", (48,)), ("norm.weight", (32,)))
    }
    save_file(values, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    with torch.device("meta"):
        layers = [
            torch.nn.ModuleDict({"up": torch.nn.Linear(32, 48), "norm": torch.nn.LayerNorm(32, bias=False)})
            for _ in range(COUNT)
        ]
    sources = []
    for number in range(COUNT):
        own = {name.partition(".")[2]: tensor for name, tensor in found.items() if name.startswith(f"{number}.")}
        sources.append({n: Source(n, t.shape, torch.float32, (SourcePiece(t),)) for n, t in own.items()})
    return layers, sources, values


def opened(stack, tiers, **options):
    layers, sources, _ = stack
    return LayerWeights(layers, sources, tiers, link=DeviceLink(), ledger=options.pop("ledger", Ledger()), **options)


def check(stack, weights, number, **options):
    layers, _, values = stack
    with weights.use(number, **options):
        for name, parameter in layers[number].named_parameters():
            assert torch.equal(parameter, values[f"{number}.{name}"]), (number, name)
            assert not parameter.requires_grad


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "tiers",
    [["disk"] * 6, ["gpu"] * 6, ["host"] * 6, ["gpu", "disk", "host"] * 2, ["disk", "gpu"] * 3, ["gpu"] * 5 + ["disk"]],
)  # fmt: skip
def test_cycles(stack, tiers, overlap):
    with opened(stack, tiers, overlap=overlap) as weights:
        for turn in range(3):
            for number in range(COUNT):
                check(stack, weights, number, last=turn == 2)


def test_parameters_have_no_memory_outside_of_their_visit(stack):
    layers, _, _ = stack
    with opened(stack, ["disk", "gpu", "host"] * 2) as weights:
        for number in range(COUNT):
            check(stack, weights, number)
            assert all(p.is_meta for layer in layers for p in layer.parameters() if layer is not layers[number])
            assert all(parameter.is_meta for parameter in layers[number].parameters())


def test_an_error_in_a_visit_leaves_the_layer_usable(stack):
    layers, _, _ = stack
    with opened(stack, ["disk"] * 6) as weights:
        for _ in range(5):
            with pytest.raises(ZeroDivisionError), weights.use(0):
                raise ZeroDivisionError
            assert all(parameter.is_meta for parameter in layers[0].parameters())
            for number in range(COUNT):
                check(stack, weights, number)


def test_a_cycle_that_begins_again_early(stack):
    """A block ended in the middle of a pass, of an early stop for example: what was begun is used later."""
    with opened(stack, ["disk"] * 6) as weights:
        for number in (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5):
            check(stack, weights, number)


def test_nothing_is_read_after_the_last_visit(stack):
    ledger = Ledger()
    with opened(stack, ["disk"] * 6, ledger=ledger) as weights:
        for turn in range(2):
            for number in range(COUNT):
                check(stack, weights, number, last=turn == 1)
    stored = sum(value.numel() * 4 for value in stack[2].values())
    assert 2 * stored <= ledger.links["weights disk to host"] <= 2 * (stored + COUNT * 8192)


def test_memory_by_tier(stack):
    sizes = {}
    for tier in ("gpu", "host", "disk"):
        ledger = Ledger()
        with opened(stack, [tier] * 6, ledger=ledger):
            sizes[tier] = dict(ledger.held)
        assert not any(ledger.held.values()), "all of it is given back"
    layer = sizes["gpu"]["gpu"] / COUNT
    assert sizes["host"]["host"] == sizes["gpu"]["gpu"]
    assert layer <= sizes["disk"]["gpu"] <= 2 * (layer + 4096)
    ledger = Ledger()
    with opened(stack, ["disk"] * 6, ledger=ledger, overlap=False):
        assert ledger.held["gpu"] * 2 == sizes["disk"]["gpu"]


def test_a_budget_is_checked_before_anything_is_read(stack):
    ledger = Ledger(Budgets(gpu=4096))
    with pytest.raises(CommandError, match="budget of gpu"):
        opened(stack, ["gpu"] * 6, ledger=ledger)
    assert not any(ledger.held.values()) and not ledger.links
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("nearflash-weights")]


def test_a_removed_file_is_read_to_its_end(stack, tmp_path):
    with opened(stack, ["disk"] * 6) as weights:
        (tmp_path / "model.safetensors").unlink()
        for layer in range(6):
            check(stack, weights, layer)


def test_closing_ends_what_is_being_read(stack):
    weights = opened(stack, ["disk"] * 6)
    check(stack, weights, 0)
    weights.close()
    weights.close()
    with pytest.raises(CommandError, match="they are closed"):
        check(stack, weights, 5)
