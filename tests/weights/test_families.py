"""Families of transformers, tiny: a checkpoint as it lies is coded, and loads to the bit, whatever its names are."""

import pytest

pytest.importorskip("accelerate")

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nearflash.weights import open_checkpoint
from nearflash.weights.convert import copy_others, write_checkpoint
from nearflash.weights.loading import load

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, ffn_dim=96, word_embed_proj_dim=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, num_local_experts=4, num_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=96, shared_expert_intermediate_size=96,
)  # fmt: skip
MOST_PARAMETERS, LEAST_FAMILIES = 3_000_000, 50
#: Linear layers, GPT-2's transposed ones with a tied head, and no attention at all.
FIRST = ("llama", "gpt2", "mamba")


def make(family):
    """A tiny model of a family; None where these sizes make none, or a large one."""
    try:
        config = CONFIG_MAPPING[family](**SIZES)
        with torch.device("meta"):
            size = sum(value.numel() for value in AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    except Exception:  # a family's own checks of its sizes raise all kinds
        return None


def find_differences(model, folder):
    """Tensors that differ after a checkpoint was coded and loaded, and the share of its elements that are coded."""
    model.save_pretrained(folder / "dense")
    written = []
    write_checkpoint(open_checkpoint(folder / "dense"), folder / "small", written=written.append)
    copy_others(None, None, folder / "dense", folder / "small")
    found = load(AutoModelForCausalLM, folder / "small").state_dict()
    coded = sum(each.elements for each in written if each.form == "coded")
    wrong = [name for name, value in model.state_dict().items() if not torch.equal(value, found[name])]
    return wrong, coded / sum(each.elements for each in written)


@pytest.mark.parametrize("family", FIRST)
def test_a_family_loads_to_the_bit(family, tmp_path):
    wrong, coded = find_differences(make(family), tmp_path)
    assert not wrong and coded >= 0.95


@pytest.mark.full
def test_fifty_families_load_to_the_bit(tmp_path):
    transformers.utils.logging.disable_progress_bar()
    found = {}
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if model := make(family):
            found[family] = find_differences(model, tmp_path / family)
    assert not {family: wrong for family, (wrong, _) in found.items() if wrong}
    # So small a matrix may stay dense, as xLSTM's constant ones do.
    assert sum(coded >= 0.95 for _, coded in found.values()) >= max(LEAST_FAMILIES, 0.98 * len(found))
