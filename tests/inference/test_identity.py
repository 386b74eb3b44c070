"""Each kind of change of model, adapter, dtype and tokenizer, and what it does to everything that is stored.

`python tests/inference/test_identity.py` prints the table of docs/contracts/identity.md.
"""

import copy
import shutil
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nearflash.abi.errors import OtherWeightsWarning, PlanError, StateError, UnsupportedError, WeightsError
from nearflash.cli.main import main
from nearflash.identity import weights_digests
from nearflash.inference.calibration.choose import UNIFORM, choose_policy, model_digest
from nearflash.inference.models import kv_shape
from nearflash.inference.policy.files import PolicyFile
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.session import Session
from nearflash.inference.setup import default_layout, open_engine
from nearflash.offload.generation import generate
from nearflash.offload.machine.plan import model_shape
from nearflash.planning.plan_file import PlanFile
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.terms import Workload
from nearflash.weights.parts import check_parts
from nearflash.weights.pretrained import silent_transformers

#: peft's own: of a second adapter, and of a model that transformers attached the first to.
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:.*is_gradient_checkpointing")
PAGE = Path(__file__).parents[2] / "docs/contracts/identity.md"
PROMPT, NEW = "the quick brown fox jumps", 5
GPU = Shares(gpu=1)
PLACED = OffloadPolicy(2, 1, GPU, GPU, GPU)


# The model


def words(exchanged=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    order = alphabet[:60] + alphabet[60:90][::-1] + alphabet[90:] if exchanged else alphabet
    return models.BPE({"<e>": 0} | {letter: n + 1 for n, letter in enumerate(order)}, [])


def tokenizer():
    own = Tokenizer(words())
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<e>", pad_token="<e>")


def tiny(**options):
    torch.manual_seed(3)
    sizes = dict(vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
                 num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=True,
                 eos_token_id=None, bos_token_id=None, dtype="float32")  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(sizes | options))).eval()


def adapted():
    model = tiny()
    for seed, name in enumerate(("one", "two")):
        torch.manual_seed(seed)
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), name)
    model.set_adapter("one")
    return model.eval()


# The changes


@torch.no_grad()
def bit(model):
    model.model.layers[1].mlp.up_proj.weight.view(torch.int32)[40, 9] ^= 1 << 22


@torch.no_grad()
def swapped(model):
    one, other = (layer.mlp.up_proj.weight for layer in model.model.layers)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


@torch.no_grad()
def scaled_buffer(model):
    model.model.rotary_emb.inv_freq *= 0.5


def apart(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def zeros(model):
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]), "new")
    model.eval()


def scale(model):
    quantized = model.model.layers[0].mlp.up_proj
    quantized.register_buffer("scale", torch.full((1,), 0.5))


def doubled(model):
    own = type(model.model.layers[0].mlp)

    class Doubled(own):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[0].mlp.__class__ = Doubled


def merged(model):
    for module in model.modules():
        if hasattr(module, "merge") and hasattr(module, "lora_A"):
            module.merge()


def rebuilt(**options):
    """The same weights under another configuration: what a process that starts later would load."""

    def change(model, words):
        made = tiny(**options)
        made.load_state_dict(model.state_dict())
        return made

    return change


def of_model(edit):
    return lambda model, words: edit(model)


def of_words(edit):
    return lambda model, words: edit(words)


def configured(name, value):
    return lambda model, words: setattr(model.config, name, value)


#: Kind of change; whether model and tokenizer can be saved with it; the edit, which may return another model.
CHANGES = {
    "nothing": (True, lambda model, words: None),
    "one bit of one weight": (True, of_model(bit)),
    "two matrices of one shape exchanged": (True, of_model(swapped)),
    "a buffer that no file holds (`inv_freq`)": (False, of_model(scaled_buffer)),
    "a quantised layer's scale": (False, of_model(scale)),
    "other widths": (True, lambda model, words: tiny(intermediate_size=128)),
    "dtype": (True, lambda model, words: model.to(torch.bfloat16)),
    "dtype of four bytes to one of two and back": (True, lambda m, words: m.to(torch.bfloat16).to(torch.float32)),
    "a tied head untied, equal": (False, of_model(apart)),
    "`rms_norm_eps`": (True, rebuilt(rms_norm_eps=0.1)),
    "`hidden_act`": (True, rebuilt(hidden_act="relu")),
    "a module's epsilon": (False, of_model(lambda m: setattr(m.model.norm, "variance_epsilon", 0.1))),
    "rotary scaling": (True, rebuilt(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    "an unknown key of the configuration": (True, configured("my_window", 7)),
    "where it was read, `use_cache`": (True, lambda m, w: m.config.update({"_name_or_path": "/x", "use_cache": False})),
    "a setting of generation": (True, lambda m, w: m.generation_config.update(repetition_penalty=1.5)),
    "a subclass with another `forward`": (False, of_model(doubled)),
    "an adapter of zeros added": (False, of_model(zeros)),
    "another adapter active": (None, of_model(lambda m: m.set_adapter("two"))),
    "the adapter disabled": (None, of_model(lambda m: m.disable_adapters())),
    "the adapter merged": (None, of_model(merged)),
    "two words of the vocabulary exchanged": (
        True, of_words(lambda w: setattr(w.backend_tokenizer, "model", words(exchanged=True)))),
    "a token added": (True, of_words(lambda w: w.add_tokens(["quick"]))),
    "normaliser": (True, of_words(lambda w: setattr(w.backend_tokenizer, "normalizer", normalizers.Replace("q", "k")))),
    "chat template alone": (True, of_words(lambda w: setattr(w, "chat_template", "{{ messages[0]['content'] }}"))),
}  # fmt: skip


# What is stored


def engine(path, model, keep=True):
    return open_engine(kv_shape(model), AttentionPolicy("dense"), tokens=128, sequences=1, path=path, keep=keep)


def without_anything_stored(model, words, prompt=PROMPT):
    ids = torch.tensor([words(prompt)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                         past_key_values=DynamicCache(config=model.config))  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


def changed(base, change):
    model, words = copy.deepcopy(base.adapted if CHANGES[change][0] is None else base.model), copy.deepcopy(base.words)
    made = CHANGES[change][1](model, words)
    return (made if isinstance(made, LlamaForCausalLM) else model), words


def session(base, change, folder):
    """Kept by the base model, opened with the changed one."""
    (base.adapted_session if CHANGES[change][0] is None else base.session)(folder / "talk")
    model, words = changed(base, change)
    try:
        with engine(folder / "talk", model) as opened:
            done = Session(model, words, opened).generate(PROMPT, max_new_tokens=NEW)
    except StateError:
        return "refused"
    assert done.reused_tokens > 0 and done.tokens[0] == without_anything_stored(model, words)
    return "used"


def turn(base, change, folder):
    """The model edited between two turns of one session; put back, it goes on."""
    model, words = copy.deepcopy(base.adapted if CHANGES[change][0] is None else base.model), copy.deepcopy(base.words)
    with engine(None, model, keep=False) as opened:
        own = Session(model, words, opened)
        own.generate(PROMPT, max_new_tokens=NEW)
        before = list(own.tokens)
        made = CHANGES[change][1](model, words)
        if isinstance(made, LlamaForCausalLM) and made is not model:
            return "–"
        try:
            done = own.generate(PROMPT, max_new_tokens=NEW)
        except StateError as error:
            assert "must stay as it was opened" in str(error) and own.tokens == before
            return "refused"
        assert done.reused_tokens > 0 and done.tokens[0] == without_anything_stored(model, words)
    return "used"


def saved(base, change, folder):
    """A folder of the changed model, or None where files have no room for the change."""
    if not CHANGES[change][0]:
        return None
    model, words = changed(base, change)
    model.save_pretrained(folder / "changed")
    words.save_pretrained(folder / "changed")
    return folder / "changed"


def results(base, change, folder):
    path = saved(base, change, folder)
    if path is None:
        return "–"
    shutil.copyfile(base.results, folder / "results")
    try:
        done = generate(path, [PROMPT], PLACED, max_new_tokens=NEW, results=folder / "results")
    except StateError as error:
        assert "its first line has another " in str(error)
        return "refused"
    assert done.resumed == 1 and done.tokens == generate(path, [PROMPT], PLACED, max_new_tokens=NEW).tokens
    return "used"


def policy(base, change, folder):
    model, _ = changed(base, change)
    file = base.adapted_policy if CHANGES[change][0] is None else base.policy
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            chosen = choose_policy(model.config, kv_shape(model), 10, file, model=model)[0]
        except StateError:
            return "refused"
    assert chosen.overrides
    return "warned" if any(each.category is OtherWeightsWarning for each in found) else "used"


def plan(base, change, folder):
    path = saved(base, change, folder)
    if path is None:
        return "–"
    try:
        base.plan.check(*model_shape(path))
    except PlanError:
        return "refused"
    done = generate(path, [PROMPT], base.plan.policy, max_new_tokens=NEW)
    with silent_transformers():
        model, words = LlamaForCausalLM.from_pretrained(path), PreTrainedTokenizerFast.from_pretrained(path)
    assert done.tokens[0] == without_anything_stored(model, words)
    return "used"


def compressed(base, change, folder):
    """Each file of the changed model's folder that differs, in place of the compressed model's."""
    path, plain = saved(base, change, folder), base.folder
    if path is None:
        return "–"
    shutil.copytree(base.compressed, folder / "small")
    for each in path.iterdir():
        before = plain / each.name
        if not before.is_file() or before.read_bytes() != each.read_bytes():
            shutil.copyfile(each, folder / "small" / each.name)
    try:
        check_parts(folder / "small")
    except WeightsError:
        return "refused"
    return "used"


USERS = {"session opened": session, "session's turn": turn, "results file": results, "policy by name": policy,
         "plan": plan, "compressed folder": compressed}  # fmt: skip


class Base:
    """What the unchanged models stored."""

    def __init__(self, folder):
        self.model, self.adapted, self.words = tiny(), adapted(), tokenizer()
        self.folder, self.results, self.compressed = folder / "model", folder / "results", folder / "small"
        self.model.save_pretrained(self.folder)
        self.words.save_pretrained(self.folder)
        generate(self.folder, [PROMPT], PLACED, max_new_tokens=NEW, results=self.results)
        self.policy, self.adapted_policy = (
            self._policy(folder / name, model) for name, model in (("p", self.model), ("q", self.adapted))
        )
        shape, stored = model_shape(self.folder)
        self.plan = PlanFile(PLACED, Workload(32, NEW), shape.digest(), "a machine", {})
        assert stored == 1
        assert (
            main(["compress", str(self.folder), "--method", "none", "--dtype", "bf16", "-o", str(self.compressed)]) == 0
        )
        self.session, self.adapted_session = (
            self._session(self.model, folder),
            self._session(self.adapted, folder / "a"),
        )

    def _policy(self, path, model):
        one = AttentionPolicy("sparf-page", score_dims=8, top_p=0.9)
        table = replace(one, overrides=dict.fromkeys(((0, 0), (1, 0)), one))
        weights = weights_digests(model, (torch.float32, torch.bfloat16))
        layout = default_layout(kv_shape(model).dim, UNIFORM, 128)
        PolicyFile("tiny", model_digest(model.config), table, layout, 0.1, 0.1, "a test", weights).write(path)
        return path

    def _session(self, model, folder):
        """Copies the files of a session that was kept once."""
        folder.mkdir(exist_ok=True)
        with engine(folder / "talk", model) as opened:
            Session(model, self.words, opened).generate(PROMPT, max_new_tokens=NEW)
        files = list(folder.glob("talk*"))

        def put(path):
            for each in files:
                shutil.copyfile(each, path.with_name(each.name))
                path.with_name(each.name).chmod(0o600)

        return put


def row(base, change, folder):
    found = []
    for name, user in USERS.items():
        own = folder / name.replace(" ", "-")
        own.mkdir()
        found.append(user(base, change, own))
    return f"| {change} | {' | '.join(found)} |"


def heading():
    return [f"| change | {' | '.join(USERS)} |", "|---" * (1 + len(USERS)) + "|"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        torch.set_num_threads(1)
        yield Base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_or_used_and_right_as_the_page_states(base, tmp_path, change):
    assert row(base, change, tmp_path) in PAGE.read_text().splitlines()


def test_the_page_has_no_other_rows():
    lines = PAGE.read_text().splitlines()
    start = lines.index(heading()[0])
    rows = [line for line in lines[start + 2 :] if line.startswith("|")]
    assert lines[start : start + 2] == heading() and [line.split("|")[1].strip() for line in rows] == list(CHANGES)


def test_weights_edited_while_a_turn_computes_leave_nothing_behind(base, tmp_path):
    """Its K and V are of two models: put back, the model computes them again."""
    model, words = copy.deepcopy(base.model), base.words

    def edit(progress):
        if progress.step == 2:
            model.model.norm.weight.data.mul_(2)

    with engine(tmp_path / "talk", model) as opened:
        own = Session(model, words, opened)
        with pytest.raises(StateError, match="its weights changed since"):
            own.generate(PROMPT, max_new_tokens=NEW, progress=edit)
        model.model.norm.weight.data.div_(2)
        done = own.generate(PROMPT, max_new_tokens=NEW)
        assert done.reused_tokens == 0 and done.tokens[0] == without_anything_stored(model, words)


def test_tokens_learned_before_the_prompt_are_a_named_error(base):
    """Prefix tuning was a raw AttributeError, and no token of a session accounts for its K and V."""
    for learned in (PrefixTuningConfig, PromptTuningConfig):
        model = get_peft_model(tiny(), learned(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
        with (
            engine(None, model, keep=False) as opened,
            pytest.raises(UnsupportedError, match="no learned tokens before"),
        ):
            Session(model, base.words, opened)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, silent_transformers():
        stored = Base(Path(place))
        sys.stdout.write("\n".join(heading()) + "\n")
        for number, change in enumerate(CHANGES):
            (Path(place) / str(number)).mkdir()
            sys.stdout.write(row(stored, change, Path(place) / str(number)) + "\n")
