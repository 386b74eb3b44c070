"""Tokens a second with K and V on this machine's disk: all read in every step, or what a policy chooses.

Cases are those of decode.py; the policies:

    sparf            tokens by approximate scores (1 of 16), from the pages that hold them
    sparf-page       KV page groups by approximate scores (1 of 8; `-16th`: 1 of 16)
    kvswap           KV page groups by queries that the layer before predicts (1 of 8; text alone)
    auto             what nearflash generate takes without being told: a calibration, or a setting that suits most, or
                     all K and V where the disk reads them as fast

Engines keep the int4 index in memory, an eighth of K and V, and unindexed suffixes (kv_suffix_bytes). In part `text`
they also keep KV page groups that they read, up to MEMORY_BYTES with the index: how often one is wanted again depends
on the text. In the parts of random numbers, where it would depend on nothing real, they keep none. top_k is a count.
Pages are as large as the disk's rates of this run ask for (setup.default_layout).
"""

import os
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import AutoConfig

from nearflash.abi.errors import CommandError
from nearflash.bench.inference.contexts import Contexts, default_config, random_contexts, random_model, text_contexts
from nearflash.bench.inference.decode import DecodeCase, measure
from nearflash.bench.inference.gpu import NO_GPU, on_gpu
from nearflash.bench.inference.memory_reads import memory_reads
from nearflash.bench.inference.short_contexts import short_contexts
from nearflash.bench.offload import larger, mixture, prediction, runtime
from nearflash.bench.options import Option, check_choices
from nearflash.inference.calibration.choose import UNIFORM, choose_policy
from nearflash.inference.models import load_model
from nearflash.inference.policy.estimate import READ_DEPTH, index_bytes, read_seconds
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.setup import default_layout
from nearflash.storage.io.measure import PAGE_BYTES, Rate, measure_drive, measure_random
from nearflash.storage.io.profile import DriveProfile
from nearflash.weights.pretrained import SMOLLM2

__all__ = ["run"]

POLICIES = {
    "sparf": AttentionPolicy(AttentionMode.SPARF, score_dims=16, top_k=1 / 16, local_window=64),
    "sparf-page": AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=16, top_k=1 / 8, local_window=64),
    "sparf-page-16th": AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=16, top_k=1 / 16, local_window=64),
}
KVSWAP = AttentionPolicy(AttentionMode.KVSWAP, score_dims=0.125, top_k=1 / 8, local_window=64)
AUTO, AHEAD = "auto", "sparf-page-ahead"
CONTEXTS = {"8k": 8192, "32k": 32768}
"""Random ones, by part."""
TEXT, SHORT, MEMORY, GPU, OFFLOAD, EXPERTS = "text", "short", "memory", "gpu", "offload", "experts"
PREDICTION, LARGER = "prediction", "larger"
"""Parts: four English texts, 32,000 tokens of context; 50 and 500 tokens; attention to what is in memory; a model on a
GPU (gpu.py); weights and cache on the disk, as planned and otherwise, beside accelerate; a mixture larger than memory;
policies drawn at random, as predicted and as measured; a model three times as large as the memory of its processes.
"""
BATCH = 4
STEPS = {TEXT: (8, 12), "8k": (1, 5), "32k": (1, 5), GPU: (3, 9)} | dict.fromkeys(
    (SHORT, MEMORY, OFFLOAD, EXPERTS, PREDICTION, LARGER), (0, 0)
)
"""Steps that are not counted, which come first, and steps that are."""
MEMORY_BYTES = 1 << 30
"""For K and V, or what an engine keeps of them."""
_LARGE_BYTES, _LARGE_DEPTH = 4 << 20, 4
_FEW_LAYERS = 12
_OF = "tokens a second of whole decode steps, median over median, of one run"


def run(
    parts: Annotated[
        Collection[str] | None, Option("Measure these parts (default: all).", many=True, choices=STEPS)
    ] = None,
    model: Annotated[
        str | None,
        Option("Measure the model of this folder (default: SmolLM2-135M, or its sizes).", metavar="DIR"),
    ] = None,
    seed: Annotated[
        int | None, Option("Draw the policies of part prediction by it (default: a random one).", int)
    ] = None,
) -> Iterator[dict[str, Any]]:
    """The disk's rates, rows of each of the `parts`, and their speedups. Raises CommandError for others."""
    wanted = check_choices("parts", parts, STEPS)
    profile = _profile()
    yield _rates_row(profile)
    for part in filter(wanted.__contains__, STEPS):
        if part == SHORT:
            yield from ({"part": part, **row} for row in short_contexts(_random_model(model)))
        elif part == OFFLOAD:
            yield from ({"part": part, **row} for row in runtime.run(None if model is None else Path(model)))
        elif part == EXPERTS:
            yield from ({"part": part, **row} for row in mixture.measure(Path(tempfile.gettempdir())))
        elif part == LARGER:
            yield from ({"part": part, **row} for row in larger.measure(Path(tempfile.gettempdir())))
        elif part == PREDICTION:
            rows = prediction.measure_apart(Path(tempfile.gettempdir()), _config(model, _FEW_LAYERS), seed)
            yield from ({"part": part, **row} for row in rows)
        elif part == GPU:
            yield from ({"part": part, **row} for row in _on_gpu(model, profile))
        elif part == MEMORY:
            yield {"part": part, **memory_reads(POLICIES["sparf-page"], profile)}
        else:
            yield from ({"part": part, **row} for row in _part(part, model, profile))


def _on_gpu(model: str | None, profile: DriveProfile) -> Iterator[dict[str, Any]]:
    if not torch.cuda.is_available():
        yield {"skipped": NO_GPU}
        return
    contexts = random_contexts(_random_model(model), CONTEXTS["32k"], BATCH, sum(STEPS[GPU]))
    yield from on_gpu(contexts, {"sparf-page": POLICIES["sparf-page"]}, MEMORY_BYTES, profile, STEPS[GPU])


def _part(part: str, model: str | None, profile: DriveProfile) -> Iterator[dict[str, Any]]:
    """Rows of the cases of a part, and what they come to."""
    try:
        contexts = _contexts(part, model)
    except CommandError as error:
        yield {"skipped": str(error)}
        return
    rows: dict[str, dict[str, Any]] = {}
    for case in _cases(part, contexts, profile):
        rows[case.name] = row = measure(case, *STEPS[part])
        yield row
    yield _speedups(part, rows, profile)


def _contexts(part: str, model: str | None) -> Contexts:
    """Raises CommandError where the model is not there."""
    steps = sum(STEPS[part])
    if part == TEXT:
        return text_contexts(*load_model(model or SMOLLM2), BATCH, steps)
    return random_contexts(_random_model(model), CONTEXTS[part], BATCH, steps)


def _config(model: str | None, layers: int = 30) -> Any:
    return default_config(layers) if model is None else AutoConfig.from_pretrained(model, local_files_only=True)


def _random_model(model: str | None) -> Any:
    return random_model(_config(model))


def _cases(part: str, contexts: Contexts, profile: DriveProfile) -> Iterator[DecodeCase]:
    """The cases of a part."""
    text = part == TEXT
    yield DecodeCase("full-kv", contexts, MEMORY_BYTES)
    if text:
        yield DecodeCase("full-kv-kept", contexts, MEMORY_BYTES, keeps=True)
    else:
        yield DecodeCase("ollm-like", contexts, MEMORY_BYTES)
        yield DecodeCase("model", contexts, MEMORY_BYTES)
        memory = DecodeCase("memory", contexts, MEMORY_BYTES)
        if memory.kv_bytes <= MEMORY_BYTES:
            yield memory
    pages = default_layout(contexts.shape.dim, UNIFORM, contexts.tokens, profile)
    index = contexts.batch * index_bytes(contexts.shape, pages, contexts.tokens)
    chosen = choose_policy(
        contexts.model.config, contexts.shape, contexts.tokens, profile=profile, sequences=contexts.batch,
        cache_bytes=MEMORY_BYTES if text else index,
    )  # fmt: skip
    # What the layer before predicts of random numbers is of no use.
    predicted = ((AHEAD, POLICIES["sparf-page"]), (str(KVSWAP.mode), KVSWAP)) if text else ()
    for name, policy in (*POLICIES.items(), *predicted, (AUTO, chosen[0])):
        layout = chosen[1] if name == AUTO else None
        yield DecodeCase(
            name, contexts, MEMORY_BYTES, policy, profile, keeps=text, layout=layout, read_ahead=name == AHEAD
        )


def _speedups(part: str, rows: dict[str, dict[str, Any]], profile: DriveProfile) -> dict[str, Any]:
    """The last row of a part."""
    rates = {name: row["tokens_per_second"] for name, row in rows.items()}
    base = "full-kv-kept" if part == TEXT else "full-kv"
    page, sixteenth = rates["sparf-page"] / rates[base], rates["sparf-page-16th"] / rates[base]
    about = {
        "speedup_auto": rates[AUTO] / rates[base],
        "auto": rows[AUTO]["policy"],
        "speedup_by_case": {name: rate / rates[base] for name, rate in rates.items()},
        "of": f"{_OF}; over {base}",
    }
    if part == TEXT:
        return {"speedup_text": page, "speedup_text_sixteenth": sixteenth, **about}
    chosen = {name: rows[name] for name in ("sparf-page", "sparf-page-16th")}
    roofline = {name: _roofline_fraction(row, rows["model"], profile) for name, row in chosen.items()}
    return {
        "speedup_eighth": page,
        "speedup_sixteenth": sixteenth,
        "io_roofline_fraction": min(roofline.values()),
        "io_roofline_fraction_by_case": roofline,
        "io_roofline_of": "the larger of flash bytes (also those read ahead and not wanted) over the disk's rate "
        "for such reads and of the model's own time, over the time of the step",
        "drive_fraction_by_case": {name: _read_s(row, profile) / _step_s(row) for name, row in chosen.items()},
        "drive_of": "flash bytes over the disk's rate for such reads, over the time of the step",
        "processor_fraction_by_case": {
            name: row["processor_seconds_of_a_step"] / len(os.sched_getaffinity(0)) / _step_s(row)
            for name, row in chosen.items()
        },
        "processor_of": "processor seconds over processors, over the time of the step: at 1 they are the limit",
        **about,
    }


def _roofline_fraction(row: dict[str, Any], model: dict[str, Any], profile: DriveProfile) -> float:
    return max(_read_s(row, profile), _step_s(model)) / _step_s(row)


def _read_s(row: dict[str, Any], profile: DriveProfile) -> float:
    """Seconds that the drive takes for the bytes of a step."""
    return read_seconds(row["flash_bytes_per_token"] * row["batch"], profile, row["page_bytes"])


def _step_s(row: dict[str, Any]) -> float:
    return float(row["batch"] / row["tokens_per_second"])


def _profile() -> DriveProfile:
    """Rates of the disk under temporary files, measured now."""
    folder = Path(tempfile.gettempdir())
    large = measure_drive(folder, blocks=(_LARGE_BYTES,), depths=(_LARGE_DEPTH,))
    return DriveProfile("now", (*large, *measure_random(folder, pages=PAGE_BYTES, depths=(READ_DEPTH,))))


def _rates_row(profile: DriveProfile) -> dict[str, Any]:
    def name(rate: Rate) -> str:
        return f"{rate.call} {rate.block_bytes >> 10} KiB x {rate.depth}"

    rates = {name(rate): [rate.median, rate.low, rate.high] for rate in profile.rates}
    return {"part": "disk", "gigabytes_per_second": rates, "of": "the disk under temporary files: median, least, most"}
