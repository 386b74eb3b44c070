"""Decoders and trained models by name."""

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.shapes import decoder, find_trained, list_trained, shape
from nearflash.explore.tables import own_tables

#: As the models' cards state them, 10^9.
PARAMETERS = {
    "opt-6.7b": 6.7, "opt-13b": 12.9, "opt-30b": 30.0, "opt-66b": 65.7, "opt-175b": 174.6, "llama-65b": 65.3,
    "llama2-7b": 6.74, "llama2-70b": 69.0, "llama3.1-8b": 8.03, "llama3.1-70b": 70.6, "mixtral-8x7b": 46.7,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(own_tables(".", "models.toml")))
def test_parameters_are_those_of_the_cards(name):
    assert decoder(name).parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(own_tables(".", "models.toml")))
def test_a_token_multiplies_with_all_of_a_dense_model(name):
    found, planned = decoder(name), shape(name)
    inner = found.layers * (found.qkv + found.out + found.ffn)
    assert found.active == inner + found.head
    share = found.active / found.parameters
    assert share == pytest.approx(0.276, abs=0.01) if planned.layers[0].experts else 0.9 < share <= 1.01


def test_kv_of_a_token():
    assert decoder("llama2-7b").kv == 2 * 32 * 4096
    assert decoder("llama3.1-70b").kv == 2 * 80 * 8 * 128
    assert decoder("opt-13b").kv * 2 == 819_200
    assert decoder("llama3.1-70b").group == 8
    assert decoder("opt-13b").group == 1


def test_a_layer_of_endor():
    """fp16 layer of OPT-66B 2.038 GB."""
    assert decoder("opt-66b").layer_parameters * 2 / 1e9 == pytest.approx(2.038, rel=0.001)


def test_vectors_of_a_layer():
    found = decoder("llama2-7b")
    assert found.inputs == 3 * 4096 + 11008
    assert found.outputs == 3 * 4096 + 4096 + 2 * 11008 + 4096
    mixed = decoder("mixtral-8x7b")
    assert mixed.inputs == 3 * 4096 + 2 * 14336


@pytest.mark.parametrize("read", [decoder, find_trained, shape])
def test_unknown_names(read):
    with pytest.raises(PlanError, match=r"model must be one of .*, not 'gpt-5'"):
        read("gpt-5")


def test_trained_models_grow():
    sizes = [find_trained(name).parameters_count for name in list_trained()]
    assert sizes == sorted(sizes)
    assert sizes[0] == 1_160_000_000
