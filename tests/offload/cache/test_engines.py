"""Which batches engines hold, where, and that tokens are those of the same policy on everything in memory."""

import copy

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.inference import AttentionMode, AttentionPolicy, NearflashCache, open_engine
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.offload import Budgets, generate
from nearflash.offload.cache.engines import KvPlaces, engine_tiers
from nearflash.planning.policy import OffloadPolicy, Shares

GPU, HOST, DISK, DEVICE = Shares(gpu=1), Shares(host=1), Shares(disk=1), Shares(device=1)
SPARSE = {
    "sparq": AttentionPolicy(AttentionMode.SPARQ, score_dims=0.5, top_k=4, local_window=2),
    "sparf": AttentionPolicy(AttentionMode.SPARF, score_dims=0.5, top_k=4, local_window=2),
    "sparf-page": AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=1, local_window=2),
}


def policy(cache, num_batches=2, weights=DISK, **options):
    return OffloadPolicy(3, num_batches, weights, cache, GPU, **options)


@torch.no_grad()
def in_memory(model, rows, attention, new_tokens):
    """Tokens of batches of three whose model and engine have all in memory."""
    attached, found = attach(copy.deepcopy(model)), []
    for at in range(0, len(rows), 3):
        batch = rows[at : at + 3]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        with open_engine(kv_shape_of(model.config), attention, tokens=96, sequences=3) as engine:
            out = attached.generate(
                input_ids=ids, attention_mask=(ids > 0).long(), past_key_values=NearflashCache(engine, model.config),
                max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None,
            )  # fmt: skip
        found += out[:, width:].tolist()
    return found


@pytest.mark.parametrize(
    ("cache", "given", "tiers"),
    [
        (HOST, {}, []),
        (HOST, {"attention": SPARSE["sparf"]}, ["memory"] * 4),
        (Shares(disk=0.5, gpu=0.5), {"attention": SPARSE["sparf"]}, ["memory", "disk", "memory", "disk"]),
        (Shares(device=0.5, disk=0.5), {}, ["device"] * 2),
        (Shares(device=0.5, disk=0.5), {"attention": SPARSE["sparf"]}, ["device"] * 2 + ["disk"] * 2),
        (DISK, {"places": KvPlaces(paths=("kv",))}, ["disk"] * 4),
        (HOST, {"places": KvPlaces(paths=("kv",))}, ["disk"] * 4),
        (HOST, {"places": KvPlaces(devices=("model:attend-tiny",))}, ["device"] * 4),
        (HOST, {"places": KvPlaces(devices=("cpu",))}, []),
    ],
)
def test_the_tiers_of_batches(cache, given, tiers):
    asked = {"attention": None, "places": KvPlaces()} | given
    assert engine_tiers(policy(cache, 4), asked["attention"], asked["places"], 4) == tiers


def test_a_small_share_of_devices_is_a_batch():
    for share, batches, count in ((0.2, 1, 1), (0.2, 4, 1), (0.7, 4, 3), (0.0, 4, 0)):
        own = policy(Shares(device=share, host=1 - share), batches)
        assert engine_tiers(own, None, KvPlaces(devices=("cpu",)), batches) == ["device"] * count


@pytest.mark.parametrize("mode", [*SPARSE])
@pytest.mark.parametrize("cache", [HOST, DISK], ids=["memory", "disk"])
def test_sparse_attention_by_a_plan_has_the_tokens_of_memory(saved, prompts, plain, tmp_path, mode, cache):
    folder, model = saved("llama")
    rows = prompts(6, longest=40, shortest=30)
    done = generate(folder, rows, policy(cache), max_new_tokens=12, stop_tokens=[], attention=SPARSE[mode],
                    scratch=tmp_path)  # fmt: skip
    assert done.tokens == in_memory(model, rows, SPARSE[mode], 12)
    assert done.tokens != plain(model, rows, 3, 12, ()), "what is chosen of some forty tokens is not all"
    assert not list(tmp_path.iterdir()), "the file has no name"
    assert ("disk" if cache is DISK else "host") in done.report.peak_bytes
    assert ("cache host to disk" in done.report.link_bytes) == (cache is DISK)


def test_what_engines_cannot_do_is_refused_first(saved, prompts, tmp_path):
    folder, _ = saved("llama")
    sparse, seen = SPARSE["sparf"], []
    for own, options, message in (
        (policy(HOST, cache_bits=4), {"attention": sparse}, "cache_bits must be 16 where an attention policy, a path"),
        (policy(DISK), {"attention": sparse, "scratch": tmp_path / "none"}, "scratch must be a folder"),
        (policy(DISK), {"attention": sparse, "budgets": Budgets(disk=4096)}, "budget of disk must be"),
        (policy(HOST), {"attention": sparse, "budgets": Budgets(host=4096)}, "budget of host must be"),
    ):
        with pytest.raises(CommandError, match=message):
            generate(folder, prompts(3), own, max_new_tokens=4, progress=seen.append, **options)
    assert not seen
    with open_engine(kv_shape_of(saved("llama")[1].config), sparse, tokens=8, sequences=1) as engine:
        with pytest.raises(CommandError, match="attention must be None with an engine"):
            generate(folder, prompts(2), policy(DEVICE), attention=sparse, engine=engine)
