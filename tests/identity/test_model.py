"""The identity of a model: every change that could change a result shows, whatever order and place things have."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.identity import ModelIdentity, configuration_digest, tokenizer_digest, weights_digests
from nearflash.identity.tensors import content_digest, sum_words
from nearflash.weights.convert import layer_weights, write_model
from nearflash.weights.loading import load


def config(**options):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, max_position_embeddings=128, rms_norm_eps=1e-5)  # fmt: skip
    return LlamaConfig(**(sizes | options))


def tiny(kind=LlamaForCausalLM, **options):
    torch.manual_seed(3)
    return kind(config(**options)).eval()


def words(exchanged=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:63]
    order = alphabet[1::-1] + alphabet[2:] if exchanged else alphabet
    return models.BPE({"<e>": 0} | {letter: n + 1 for n, letter in enumerate(order)}, [])


def letters(**options):
    own = Tokenizer(words())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<e>", **options)


def first(model):
    return model.model.layers[0]


@torch.no_grad()
def add_one(tensor):
    tensor += 1


@torch.no_grad()
def swap(model):
    one, other = (layer.mlp.up_proj.weight for layer in model.model.layers)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def other_forward(model):
    own = type(first(model).mlp)

    class Doubled(own):
        def forward(self, x):
            return 2 * super().forward(x)

    Doubled.__qualname__, Doubled.__module__ = own.__qualname__, own.__module__
    first(model).mlp.__class__ = Doubled


def steer(model):
    vector = torch.ones(32)
    first(model).register_forward_hook(lambda module, given, out: out + vector)


EDITS = {
    "one bit of one weight": lambda m: m.model.layers[1].self_attn.v_proj.weight.data.view(torch.int32)[5, 7].add_(1),
    "an edit past autograd's version": lambda m: first(m).mlp.down_proj.weight.data.mul_(1.5),
    "an edit through numpy": lambda m: first(m).mlp.gate_proj.weight.detach().numpy().__setitem__((0, 0), 7),
    "one row of the embedding": lambda m: add_one(m.model.embed_tokens.weight[9]),
    "a norm": lambda m: add_one(m.model.norm.weight),
    "two equal shapes swapped": swap,
    "a buffer that no file holds": lambda m: add_one(m.model.rotary_emb.inv_freq),
    "a buffer more": lambda m: first(m).register_buffer("weight_scale", torch.ones(1)),
    "a tensor that is no buffer": lambda m: setattr(first(m), "steer", torch.ones(3)),
    "negative zero for zero": lambda m: m.model.norm.weight.data.zero_().neg_(),
    "dtype": lambda m: m.to(torch.bfloat16),
    "epsilon in the configuration": lambda m: setattr(m.config, "rms_norm_eps", 1e-3),
    "epsilon in a module": lambda m: setattr(m.model.norm, "variance_epsilon", 1e-3),
    "activation in the configuration": lambda m: setattr(m.config, "hidden_act", "gelu"),
    "activation of a module": lambda m: setattr(first(m).mlp, "act_fn", torch.nn.GELU()),
    "scale of attention": lambda m: setattr(first(m).self_attn, "scaling", 0.5),
    "rotary base": lambda m: m.config.rope_parameters.update(rope_theta=77.0),
    "an unknown key of the configuration": lambda m: setattr(m.config, "my_window", 3),
    "layers in another order": lambda m: setattr(m.model, "layers", torch.nn.ModuleList(list(m.model.layers)[::-1])),
    "a subclass with another forward": other_forward,
    "a forward replaced on one module": lambda m: setattr(first(m).mlp, "forward", lambda x: x),
    "a hook that adds a vector": steer,
    "training mode": lambda m: m.train(),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("quick", [False, True], ids=["hash", "sum"])
def test_an_edit_of_the_model_shows(edit, quick):
    model = tiny()
    before = ModelIdentity.of(model, quick=quick)
    assert before == ModelIdentity.of(tiny(), quick=quick)
    EDITS[edit](model)
    assert before.differing(ModelIdentity.of(model, quick=quick))


SAME = {
    "where it was read": lambda m: setattr(m.config, "_name_or_path", "/elsewhere"),
    "the name in a module": lambda m: setattr(m, "name_or_path", "/elsewhere"),
    "use_cache": lambda m: setattr(m.config, "use_cache", False),
    "dtype's older spelling": lambda m: setattr(m.config, "torch_dtype", "float32"),
    "order of architectures": lambda m: setattr(m.config, "architectures", ["B", "A"]),
    "a forward pass": lambda m: m(torch.tensor([[1, 2, 3]])),
    "a hook that records": lambda m: first(m).register_forward_hook(list().append) and None,
    "a key with its class's default": lambda m: setattr(m.config, "attention_bias", False),
}  # fmt: skip


@pytest.mark.parametrize("edit", SAME)
def test_what_decides_no_result_is_no_change(edit):
    model = tiny()
    before = ModelIdentity.of(model)
    SAME[edit](model)
    assert not before.differing(ModelIdentity.of(model))


def test_tied_weights_and_equal_copies_are_the_same_model():
    tied, apart = tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=True)
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    one, other = ModelIdentity.of(tied), ModelIdentity.of(apart)
    assert one == other
    add_one(apart.lm_head.weight)
    assert one.differing(ModelIdentity.of(apart)) == "weights"


def test_bytes_alone_decide_not_the_place_in_memory():
    value = torch.arange(12.0).reshape(3, 4)
    assert content_digest(value) == content_digest(value.t().contiguous().t()) == content_digest(value.repeat(2, 1)[:3])
    assert content_digest(value) != content_digest(value.reshape(4, 3)) != content_digest(value.view(torch.int32))
    assert content_digest(torch.tensor(1.0)) != content_digest(torch.tensor([1.0]))
    many = torch.zeros((9 << 20) + 3, dtype=torch.uint8)
    before = content_digest(many)
    many[-1] = 1
    assert content_digest(many) != before


def test_sums_that_a_gpu_computes_tell_a_swap_and_a_bit():
    values = torch.arange(4099, dtype=torch.int64).to(torch.uint8)
    before, swapped, bit = sum_words(values), values.clone(), values.clone()
    swapped[:8] = swapped[:8].flip(0)
    bit[-1] ^= 1
    assert len({before, sum_words(swapped), sum_words(bit)}) == 3 and before == sum_words(values.clone())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
class TestAdapters:
    def adapted(self, names=("one",)):
        base, lora = tiny(), LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=True)
        torch.manual_seed(5)
        model = get_peft_model(base, lora, adapter_name=names[0])
        for name in names[1:]:
            model.add_adapter(name, lora)
        return model.eval()

    def layer(self, model):
        return model.base_model.model.model.layers[0].self_attn.q_proj

    EDITS = {
        "its weights": lambda model, layer: add_one(layer.lora_B["one"].weight),
        "its scale": lambda model, layer: layer.scaling.__setitem__("one", 9.0),
        "disabled": lambda model, layer: layer.enable_adapters(False),
        "merged": lambda model, layer: model.merge_adapter(),
        "another one": lambda model, layer: model.set_adapter("two"),
    }  # fmt: skip

    @pytest.mark.parametrize("edit", EDITS)
    def test_what_adapters_compute_shows(self, edit):
        model = self.adapted(("one", "two"))
        before = ModelIdentity.of(model)
        self.EDITS[edit](model, self.layer(model))
        assert before.differing(ModelIdentity.of(model))

    def test_an_adapter_of_zeros_is_added_and_trained(self):
        """A sampled digest took a model with LoRA for the one without."""
        plain, adapted = ModelIdentity.of(tiny()), self.adapted()
        zeros = ModelIdentity.of(adapted)
        add_one(self.layer(adapted).lora_B["one"].weight)
        assert plain.differing(zeros) and zeros.differing(ModelIdentity.of(adapted)) == "weights"

    def test_an_adapter_that_is_loaded_and_not_used_is_no_change(self):
        one, both = self.adapted(), self.adapted(("one", "two"))
        add_one(self.layer(both).lora_B["two"].weight)
        assert not ModelIdentity.of(one).differing(ModelIdentity.of(both))


TOKENIZERS = {
    "an added token": lambda t: t.add_tokens(["xy"]),
    "an added special token": lambda t: t.add_special_tokens({"pad_token": "<p>"}),
    "chat template": lambda t: setattr(t, "chat_template", "{{ messages }}"),
    "normaliser": lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.Lowercase()),
    "two words exchanged": lambda t: setattr(t.backend_tokenizer, "model", words(exchanged=True)),
    "end of text": lambda t: setattr(t, "eos_token", "!"),
    "tokens split": lambda t: setattr(t, "split_special_tokens", True),
}  # fmt: skip


@pytest.mark.parametrize("edit", TOKENIZERS)
def test_an_edit_of_the_tokenizer_shows(edit):
    tokenizer = letters()
    before = tokenizer_digest(tokenizer)
    assert before == tokenizer_digest(letters())
    TOKENIZERS[edit](tokenizer)
    assert tokenizer_digest(tokenizer) != before


def test_padding_of_the_last_call_and_the_folder_are_no_change():
    tokenizer = letters(pad_token="<e>")
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    tokenizer.name_or_path = "/elsewhere"
    assert tokenizer_digest(tokenizer) == before


def test_rotary_positions_that_follow_the_length_go_on():
    """Their frequencies are computed again in each pass: a second turn would have been of another model."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny(rope_parameters=rope, max_position_embeddings=8)
    before = ModelIdentity.of(model)
    model(torch.arange(30)[None])
    assert not before.differing(ModelIdentity.of(model))
    assert before.differing(ModelIdentity.of(tiny(rope_parameters=rope | {"factor": 4.0}, max_position_embeddings=8)))


class TestWithoutMemory:
    def test_weights_that_hooks_bring_are_hashed_where_they_come_from(self, tmp_path):
        whole = ModelIdentity.of(tiny())
        for offloaded in (cpu_offload(tiny(), "cpu"), disk_offload(tiny(), tmp_path, "cpu")):
            assert next(offloaded.parameters()).is_meta
            found = ModelIdentity.of(offloaded)
            assert found.weights == whole.weights and not whole.differing(found)
        file = next(Path(tmp_path).glob("*up_proj*.dat"))
        data = np.fromfile(file, np.uint8)
        data[40] ^= 1
        data.tofile(file)
        assert whole.differing(ModelIdentity.of(offloaded)) == "weights"

    def test_weights_that_a_budget_leaves_on_disk_are_those_of_the_model_in_memory(self, tmp_path):
        """Their parameters were a raw error."""
        model = tiny(hidden_size=128, intermediate_size=256).to(torch.bfloat16)
        with torch.no_grad():
            for each in model.model.layers.parameters():
                each[..., ::2] = 0
        write_model(model, tmp_path, format="bitmap", bits=16, dtype=torch.bfloat16, compressed=layer_weights(model))
        model.config.save_pretrained(tmp_path)
        with pytest.raises(CommandError, match=r"budget must be \d+ bytes") as error:
            load(LlamaForCausalLM, tmp_path, budget=0)
        small = load(LlamaForCausalLM, tmp_path, budget=int(str(error.value).split()[3]))
        assert any(each.is_meta for each in small.parameters())
        assert not ModelIdentity.of(load(LlamaForCausalLM, tmp_path)).differing(ModelIdentity.of(small))

    def test_weights_that_are_nowhere_are_a_named_error(self):
        """A raw NotImplementedError came out of torch."""
        with torch.device("meta"):
            model = LlamaForCausalLM(config())
        with pytest.raises(UnsupportedError, match=r"'model\.embed_tokens\.weight' must have memory, or a source"):
            ModelIdentity.of(model)

    def test_bytes_that_cannot_be_read_are_a_named_error(self):
        model = tiny()
        first(model).register_buffer("more", torch.eye(3).to_sparse())
        with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.more' must be of plain bytes"):
            ModelIdentity.of(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning", "ignore:.*quantized tensor")
def test_codes_and_scales_of_quantised_layers_are_compared():
    """They are neither parameters nor buffers: no digest of those had them."""

    def quantized(scale=1.0):
        model = tiny()
        with torch.no_grad():
            first(model).mlp.up_proj.weight *= scale
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    before = ModelIdentity.of(quantized())
    assert before == ModelIdentity.of(quantized())
    assert before.differing(ModelIdentity.of(quantized(2.0))) == "weights", "the same codes, another scale"


def test_parameters_in_another_dtype_are_those_of_the_model_loaded_in_it():
    model = tiny()
    found = weights_digests(model, (torch.float32, torch.bfloat16))
    assert found["bfloat16"] == weights_digests(copy.deepcopy(model).to(torch.bfloat16), (torch.bfloat16,))["bfloat16"]
    assert found["float32"] != found["bfloat16"]


def test_a_value_equal_to_the_default_is_not_the_absent_one_of_another_key():
    assert configuration_digest(config(hidden_act="silu")) == configuration_digest(config())
    one = configuration_digest(config(sliding_window=None))
    assert one == configuration_digest(config()) != configuration_digest(config(sliding_window=64))
