"""Every combination of weights, tiers, KV cache and attention, from the command line to tokens: it runs, or is rejected
by name before anything is loaded.

Where nothing is lossy, tokens are those of transformers' own generate; else those of the same lossy thing in memory.
Bytes over links are the plan's where it predicts them, within 2 % and a block of each read. So they are where what
computes has a memory of its own beside the host's, as a GPU, whose copies the link counts.
"""

import itertools
import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("scipy")

from nearflash.cli import main as cli
from nearflash.inference import AttentionMode, AttentionPolicy, NearflashCache, open_engine
from nearflash.inference.cache.attention import attach
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.offload import OffloadedModel, generate, generation
from nearflash.offload.machine.plan import crossing_fraction, model_shape
from nearflash.offload.tiers.link import DeviceLink
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import DeviceTier, load_machine
from nearflash.planning.search import Workload, plan_for
from nearflash.weights.loading import load

WEIGHTS = {"dense": None, "bitmap": ("bitmap", 16), "coded": ("coded-bitmap", 16), "int8": ("groups", 8),
           "int4": ("groups", 4)}  # fmt: skip
FORMATS = {**WEIGHTS, "levels": ("coded", 16)}
"""Of folders."""
TIERS = {"memory": "gpu=1", "host": "host=1", "disk": "disk=1"}
"""Of weights."""
SHARES = {"memory": Shares(gpu=1), "host": Shares(host=1), "disk": Shares(disk=1)}
KV_TIERS = ("memory", "disk")
LAYERS = 2
DEVICES = {"model": "model:attend-tiny", "verilator": "verilator:attend-tiny"}
ENGINES = {"files": "cpu", **DEVICES}
"""Device of the engine where K and V lie in two files, or on devices."""
SPARSE = (
    "--attention",
    "sparf-page",
    "--score-dims",
    "0.5",
    "--top-k",
    "1",
    "--local-window",
    "2",
    "--min-tokens",
    "0",
)
KVSWAP = ("--attention", "kvswap", "--top-k", "1", "--local-window", "2", "--min-tokens", "0")
OPTIONS = {"dense": ("--attention", "dense"), "sparf-page": SPARSE, "kvswap": KVSWAP}
POLICIES = {
    "dense": AttentionPolicy(),
    "sparf-page": AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=1, local_window=2, min_tokens=0),
    "kvswap": AttentionPolicy(AttentionMode.KVSWAP, score_dims=0.125, top_k=1, local_window=2, min_tokens=0),
}
PROMPT, NEW, SEQUENCES = 33, 6, 4
NEW_PAIRS = 5
BLOCKS = {"weights disk to host": NEW * LAYERS * 3, "cache disk to host": (NEW - 1) * LAYERS * 2 * 2,
          "cache host to disk": LAYERS * 2}  # fmt: skip
"""That reads and writes of whole ones may have more than the plan, or less."""
ROUNDED = 2 * (1 + 3 * LAYERS) * 4096
"""Of memory: hidden states of both batches, and of each layer's K and V what lies there, what passes, the tail."""


def list_cells():
    """Each with its marks."""
    axes = ([*WEIGHTS], [*TIERS], ["fp16", "int4"], [*KV_TIERS, *ENGINES], [*POLICIES])
    return mark_pairs([cell for cell in itertools.product(*axes) if cell[3] != "verilator" or cell[0] == "dense"])


def mark_pairs(cells):
    """`make test` has those that bring pairs of values which no earlier one has."""
    seen = set()
    for number in range(len(cells)):
        cell = cells[number * 37 % len(cells)]  # neighbours differ in several values
        pairs = set(itertools.combinations(enumerate(cell), 2))
        quick = len(pairs - seen) >= NEW_PAIRS and "verilator" not in cell  # whose simulator takes a minute to build
        seen |= pairs if quick else set()
        yield pytest.param(*cell, id="-".join(cell), marks=[] if quick else [pytest.mark.full])


@pytest.fixture(scope="module")
def folders(saved, tmp_path_factory):
    """Makes the folder of a model, its layers' matrices in a format."""
    from safetensors.torch import load_file

    from nearflash.weights.compress import compress_tensor
    from nearflash.weights.file import PackedTensor, write_file

    made, sizes = {}, {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024}
    source, _ = saved("llama", **sizes, eos_token_id=None)

    def folder(name):
        if name in made:
            return made[name]
        made[name] = tmp_path_factory.mktemp(name)
        config = json.loads((source / "config.json").read_text())
        for key in ("torch_dtype", "dtype"):
            config[key] = "bfloat16"
        (made[name] / "config.json").write_text(json.dumps(config))
        packed = []
        for tensor, value in load_file(source / "model.safetensors").items():
            patterns = value.to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
            if value.ndim == 2 and ".layers." in tensor and FORMATS[name] is not None:
                if name == "bitmap":  # half of it
                    patterns = np.where(value.abs() > value.abs().median(), patterns, 0).astype(np.uint16)
                packed.append(compress_tensor(tensor, patterns, *FORMATS[name]))
            else:
                data = patterns.reshape(-1).view("uint8")
                packed.append(PackedTensor(tensor, "BF16", tuple(value.shape), "dense", data))
        planned = {each.name: (each.dtype, each.shape) for each in packed}
        write_file(made[name] / "model.safetensors", planned, packed)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 97, (SEQUENCES, PROMPT), generator=generator).tolist()


@pytest.fixture(scope="module")
def expected(folders, rows, plain):
    """Makes the tokens of weights and a way to keep K and V, everything in memory."""
    made = {}

    def tokens(weights, cache, device, attention):
        key = weights, cache, device, attention
        if key not in made:
            if cache == "int4":
                places = OffloadPolicy(2, 2, Shares(gpu=1), Shares(gpu=1), Shares(gpu=1), cache_bits=4)
                made[key] = generate(folders(weights), rows, places, max_new_tokens=NEW).tokens
            else:
                model = load(AutoModelForCausalLM, folders(weights))
                by_engine = device is not None or attention != "dense"
                made[key] = (
                    engine_tokens(model, rows, device, attention) if by_engine else plain(model, rows, 2, NEW, ())
                )
        return made[key]

    return tokens


@torch.no_grad()
def engine_tokens(model, rows, device, attention):
    attached, found = attach(model), []
    for at in range(0, len(rows), 2):
        ids = torch.tensor(rows[at : at + 2])
        shape, options = kv_shape_of(model.config), {"sequences": 2, "device": device or "cpu", "cache_bytes": 1 << 22}
        with open_engine(shape, POLICIES[attention], tokens=ids.shape[1] + NEW, **options) as engine:
            out = attached.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0,
                past_key_values=NearflashCache(engine, model.config),
            )  # fmt: skip
        found += out[:, ids.shape[1] :].tolist()
    return found


@pytest.fixture
def runs(monkeypatch):
    """Results of the runs that the command makes."""
    seen, run = [], OffloadedModel.generate

    def generate_and_note(self, *args, **options):
        seen.append(run(self, *args, **options))
        return seen[-1]

    monkeypatch.setattr(OffloadedModel, "generate", generate_and_note)
    return seen


@pytest.mark.parametrize(("weights", "tier", "cache", "place", "attention"), list(list_cells()))
def test_a_cell_runs_or_is_rejected(
    folders, rows, expected, runs, tmp_path, capsys, monkeypatch, weights, tier, cache, place, attention
):
    folder, file = folders(weights), tmp_path / "prompts"
    file.write_text("".join(f"{row}\n" for row in rows))
    command = [
        "generate",
        "--json",
        "--model",
        folder,
        "--prompts",
        file,
        "--max-new-tokens",
        NEW,
        "--scratch",
        tmp_path,
    ]
    command += [
        "--batch-size",
        2,
        "--num-batches",
        2,
        "--weights",
        TIERS[tier],
        "--cache-bits",
        4 if cache == "int4" else 16,
    ]
    if place == "files":
        command += ["--path", tmp_path / "a", "--path", tmp_path / "b"]
    else:
        command += ["--kv-device", DEVICES[place]] if place in DEVICES else ["--cache", TIERS[place]]
    command += OPTIONS[attention]
    by_engine = place in ENGINES or attention != "dense"
    if by_engine and cache == "int4":
        monkeypatch.setattr(OffloadedModel, "__init__", None)  # nothing is loaded
        assert cli.main([str(each) for each in command]) == 2
        assert "cache_bits must be 16 where an attention policy, a path, a device" in capsys.readouterr().err
        return
    if place in ENGINES and attention == "kvswap":
        monkeypatch.setattr(OffloadedModel, "__init__", None)
        assert cli.main([str(each) for each in command]) == 2
        assert "attention kvswap must be on device cpu, with one file" in capsys.readouterr().err
        return
    assert cli.main([str(each) for each in command]) == 0
    found = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    assert found == expected(weights, cache, ENGINES.get(place), attention)
    left = {"prompts", "a", "b"} if place == "files" else {"prompts"}
    assert {path.name for path in tmp_path.iterdir()} == left
    check_bytes(runs[0].report.link_bytes, folder, tier, cache, place, attention)


def planned_bytes(folder, tier, cache, place, prompt=PROMPT, new=NEW):
    """Bytes of each link, of all prompts."""
    shape, stored = model_shape(folder)
    at = Shares(device=1) if place in DEVICES else SHARES.get(place, Shares(disk=1))
    own = OffloadPolicy(2, 2, SHARES[tier], at, Shares(gpu=1), cpu_attention=True,
                        cache_bits=4 if cache == "int4" else 16, stored_fraction=stored)  # fmt: skip
    machine = replace(load_machine("gpu24"), device=DeviceTier("these", 1e9, 1e9, 1e9, 1e9))
    moved = plan_for(shape, machine, Workload(prompt, new), own).prediction.bytes_per_token
    return {link: size * SEQUENCES * new for link, size in moved.items()}


@pytest.mark.parametrize(
    ("weights", "tier", "cache", "place", "attends"),
    list(mark_pairs([*itertools.product(FORMATS, TIERS, ["fp16", "int4"], SHARES, ["gpu", "host"])])),
)
def test_a_link_moves_what_the_plan_counts(
    folders, rows, expected, tmp_path, monkeypatch, weights, tier, cache, place, attends
):
    """What computes has a memory of its own: compressed weights and codes of K and V cross as they are stored; where
    the host attends, K and V of new tokens, queries and outputs alone.
    """
    folder, bits = folders(weights), 4 if cache == "int4" else 16
    shape, stored = model_shape(folder)
    own = OffloadPolicy(2, 2, SHARES[tier], SHARES[place], SHARES["host"], cache_bits=bits, stored_fraction=stored,
                        cpu_attention=attends == "host", crossing_fraction=crossing_fraction(folder))  # fmt: skip
    plan = plan_for(shape, load_machine("gpu24"), Workload(PROMPT, NEW), own)
    monkeypatch.setattr(generation, "DeviceLink", partial(DeviceLink, one_memory=False))
    done = generate(folder, rows, own, max_new_tokens=NEW, scratch=tmp_path)
    assert done.tokens == expected(weights, cache, None, "dense")
    links = {name: size for name, size in done.report.link_bytes.items() if "gpu to gpu" not in name}
    planned = {name: size * SEQUENCES * NEW for name, size in plan.prediction.bytes_per_token.items() if size}
    assert links.keys() == planned.keys()
    for name, size in planned.items():
        assert links[name] == pytest.approx(size, rel=0.02, abs=BLOCKS.get(name, 0) * 4096 + 0.02 * size), name
    for name, peak in plan.peaks.items():
        assert done.report.peak_bytes.get(name, 0) <= peak.peak_bytes + ROUNDED, name


def stored_fraction(folder):
    return model_shape(folder)[1]


def check_bytes(links, folder, tier, cache, place, attention):
    """The plan knows nothing of what a policy leaves out, nor of engines' pages; in short contexts blocks count."""
    planned = planned_bytes(folder, tier, cache, place)
    names = ["weights disk to host"]
    if tier == "host" and stored_fraction(folder) < 1:  # dense ones are used where they lie: what computes is the host
        names.append("weights host to gpu")
    if attention == "dense" and place != "files":
        names += ["cache disk to host", "cache host to disk", "cache host to device", "cache device to host"]
    elif place in DEVICES:
        names += ["cache host to device", "cache device to host"]
    for name in names:
        slack = BLOCKS.get(name, 0) * 4096 if planned[name] else 0
        assert links.get(name, 0) == pytest.approx(planned[name], rel=0.02, abs=max(slack, 0.02 * planned[name])), name


@pytest.mark.parametrize("tier", TIERS)
def test_kvswap_chooses_alike_by_a_plan(folders, tmp_path, tier):
    """Of contexts with whole blocks: the layers' weights come and go, batches take turns, and predict as in memory."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(3, 97, (SEQUENCES, 300), generator=generator).tolist()
    own = OffloadPolicy(2, 2, SHARES[tier], SHARES["disk"], Shares(gpu=1), cpu_attention=True)
    done = generate(folders("dense"), rows, own, max_new_tokens=NEW, scratch=tmp_path, attention=POLICIES["kvswap"])
    model = load(AutoModelForCausalLM, folders("dense"))
    assert done.tokens == engine_tokens(model, rows, None, "kvswap")
    everything = planned_bytes(folders("dense"), tier, "fp16", "disk", 300, NEW)["cache disk to host"]
    assert 0 < done.report.link_bytes["cache disk to host"] < everything


@pytest.mark.parametrize("cache", ["fp16", "int4"])
def test_bytes_of_a_longer_context_are_the_plans(folders, tmp_path, cache):
    """Within 2 %, blocks and all."""
    folder, bits = folders("dense"), 4 if cache == "int4" else 16
    own = OffloadPolicy(
        SEQUENCES, 1, SHARES["disk"], SHARES["disk"], Shares(gpu=1), cpu_attention=True, cache_bits=bits
    )
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(3, 97, (SEQUENCES, 480), generator=generator).tolist()
    links = generate(folder, rows, own, max_new_tokens=6, scratch=tmp_path).report.link_bytes
    planned = planned_bytes(folder, "disk", cache, "disk", 480, 6)
    for name in ("weights disk to host", "cache disk to host", "cache host to disk"):
        assert links[name] == pytest.approx(planned[name], rel=0.02), name
