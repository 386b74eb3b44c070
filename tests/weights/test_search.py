"""Forms of layers chosen by measured losses."""

from pathlib import Path

import pytest

pytest.importorskip("accelerate")

import torch
import transformers

from nearflash.abi.errors import NonFiniteError
from nearflash.weights import search as search_module
from nearflash.weights.compress import compress_tensor
from nearflash.weights.layers import layers_with_matrices
from nearflash.weights.pretrained import load_model
from nearflash.weights.search import (
    LayerForm,
    LayerSearch,
    MeasuredForm,
    list_choices,
    list_steps,
    pick_by_loss,
    pick_by_size,
)
from nearflash.weights.sensitivity import LayerSensitivity

DOCLM = Path(__file__).parents[1] / "data" / "doclm-7m"
LOSSLESS, INT8, INT4 = list_choices("none")
TOKENS = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(1))


def measured(layer, *points):
    return [MeasuredForm(layer, LayerForm(0.0 if not number else 0.1 * number, "coded", 16), size, loss)
            for number, (size, loss) in enumerate(points)]  # fmt: skip


def test_steps_take_the_cheapest_byte_first():
    rows = [*measured(0, (100, 1.0), (50, 1.1), (60, 1.5), (20, 1.3)), *measured(1, (100, 1.0), (50, 1.01), (20, 2.0))]
    steps = [{layer: each.stored_bytes for layer, each in step.items()} for step in list_steps(rows, 2)]
    assert steps == [{0: 100, 1: 100}, {0: 100, 1: 50}, {0: 50, 1: 50}, {0: 20, 1: 50}, {0: 20, 1: 20}]


def test_a_form_that_is_smaller_and_better_is_taken_at_once():
    steps = list_steps(measured(0, (100, 1.0), (80, 1.2), (50, 0.9)), 1)
    assert [step[0].stored_bytes for step in steps] == [100, 50]


def test_sizes_and_losses_pick_a_step():
    steps = list_steps(measured(0, (100, 1.0), (50, 1.1), (20, 1.3)), 1)
    assert [pick_by_size(steps, room)[0].stored_bytes for room in (100, 99, 50, 20)] == [100, 50, 50, 20]
    for most, expected in ((1.0, 100), (1.15, 50), (9, 20)):
        assert pick_by_loss(steps, most, lambda step: step[0].loss)[0].stored_bytes == expected


def test_a_model_is_as_it_was_until_a_choice_is_applied():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=2)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    search = LayerSearch(model, "wanda", torch.float16)
    assert list(search.calibrate(TOKENS)) == [0, 1]
    rows = [row for form in search.measure(TOKENS) for row in form]
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in before.items())
    assert len(rows) == 2 * len(search.choices) == 18
    sizes = {row.choice: row.stored_bytes for row in rows if row.layer == 1}
    assert sizes[INT4] < sizes[INT8] < sizes[LOSSLESS] and search.least_bytes() <= 2 * sizes[INT4]
    losses = {row.choice: row.loss for row in rows if row.layer == 1}
    assert losses[LOSSLESS] < 1e-5 and losses[INT8] < losses[LayerForm(0.5, "bitmap", 4)]
    both = {0: LayerForm(0.5, "coded", 16), 1: INT4}
    assert search.measure_loss(both, TOKENS) != search.measure_loss({}, TOKENS)
    forms = search.apply(both)
    assert set(forms.values()) == {("coded", 16), ("groups", 4)} and len(forms) == 14
    weight = model.model.layers[0].mlp.up_proj.weight
    assert float((weight != 0).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_lossless_layers_are_packed_once(monkeypatch):
    """They were once to know their bytes, and again to measure them."""
    packed = []

    def compress(name, values, format, bits):
        packed.append((name, format))
        return compress_tensor(name, values, format, bits)

    monkeypatch.setattr(search_module, "compress_tensor", compress)
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=2)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    direct, _, _ = LayerSearch(model, "none", torch.float16).measure(TOKENS[:1])
    assert len(packed) == 42 and packed[:14] == [(name, "coded") for name, _ in packed[:14]]
    search = LayerSearch(model, "none", torch.float16)
    listed = search.list_lossless()
    found, _, _ = search.measure(TOKENS[:1])
    assert [form.stored_bytes for form in found] == [form.stored_bytes for form in listed]
    assert found == direct and len(packed) == 84


def test_estimates_of_a_layer_are_near_its_measured_loss():
    """A layer computes again, those behind it do not; the form that costs the model more is estimated to."""
    model = load_model(DOCLM)
    model.requires_grad_(False)
    tokens = torch.randint(0, 8192, (2, 48), generator=torch.Generator().manual_seed(1))
    sensitivity = LayerSensitivity(model, layers_with_matrices(model), tokens)
    assert sensitivity.estimate(3) == 0
    search, found = LayerSearch(model, "none", torch.float16), {}
    for form in (INT8, INT4):
        with search.fill_layers(form):
            found[form] = [sensitivity.estimate(layer) for layer in range(search.layers)]
    assert all(0 < low < high < 0.1 for low, high in zip(*found.values(), strict=True))
    measured = search.measure_loss(dict.fromkeys(range(search.layers), INT4), tokens) - search.measure_loss({}, tokens)
    assert sensitivity.estimate(3) == 0 and abs(measured) < 10 * sum(found[INT4])


def test_a_model_without_finite_logits_is_a_named_error():
    """Regression: torch's error of a probability tensor reached the user of `compress --target +0.1`."""
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=2)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="logits must be finite: compute in fp32"):
        LayerSensitivity(model, layers_with_matrices(model), TOKENS[:1])
