"""Random models of several families in folders, and what transformers itself generates with them."""

import shutil

import pytest
import torch

COMMON = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES = {
    "llama": ("LlamaConfig", {"head_dim": 64}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}),
    "opt": ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "gpt_oss": ("GptOssConfig", {**MOE, "head_dim": 16, "sliding_window": 16, "rope_parameters": ROPE}),
}  # fmt: skip


def build(family, seed=5, **changes):
    import transformers

    name, own = FAMILIES[family]
    settings = {**COMMON, **own, **changes}
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # more than the small numbers of an initialisation, so that tokens differ
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.1 if parameter.ndim > 1 else 0.02))
    return model


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Matrices are tiny: a team of threads is slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_digests_of_the_users(tmp_path_factory):
    """What file_digest keeps of files that it read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Folder and model of a family, saved once."""
    made = {}

    def save(family, **changes):
        key = (family, *sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            model = build(family, **changes)
            model.save_pretrained(folder)
            made[key] = folder, model
        return made[key]

    return save


def make_prompts(count=7, seed=1, longest=13, shortest=3):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def greedy(model, rows, batch_size, new_tokens, stops=(2,)):
    """transformers' own greedy tokens for the same batches, up to the stop token."""
    found = []
    for at in range(0, len(rows), batch_size):
        batch = rows[at : at + batch_size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
            eos_token_id=list(stops) or None,
        )  # fmt: skip
        for tokens in out[:, width:].tolist():
            end = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
            found.append(tokens[: end + 1])
    return found


@pytest.fixture(scope="session")
def prompts():
    """Makes lists of tokens of unequal lengths."""
    return make_prompts


@pytest.fixture(scope="session")
def plain():
    """Generates with transformers alone."""
    return greedy


@pytest.fixture
def compressed(saved, tmp_path):
    """Makes a compressed copy of the bf16 model of a family: layers' matrices alone."""
    from safetensors.torch import load_file

    from nearflash.weights.compress import compress_tensor
    from nearflash.weights.file import PackedTensor, write_file

    def make(format, bits, family="llama"):
        source, _ = saved(family)
        folder = tmp_path / f"compressed-{format}-{bits}"
        folder.mkdir()
        for name in ("config.json", "generation_config.json"):
            shutil.copy(source / name, folder / name)
        packed = []
        for name, value in load_file(source / "model.safetensors").items():
            patterns = value.to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
            if value.ndim == 2 and ".layers." in name:
                packed.append(compress_tensor(name, patterns, format, bits))
            else:
                shape, data = tuple(value.shape), patterns.reshape(-1).view("uint8")
                packed.append(PackedTensor(name, "BF16", shape, "dense", data))
        planned = {each.name: (each.dtype, each.shape) for each in packed}
        write_file(folder / "model.safetensors", planned, packed)
        return folder

    return make
