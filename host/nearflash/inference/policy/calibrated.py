"""Policies that were calibrated for a model: score_dims and top_p of every KV head, and the page layout they are for.

Files are JSON, in the folder `calibrated`; `nearflash.bench.inference.calibrate` writes them. Loads no torch.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.kv import KvLayout

__all__ = ["calibrated", "calibrated_names", "write_calibrated"]

_FOLDER = Path(__file__).with_suffix("")


def calibrated_names() -> list[str]:
    """Models that there are policies for."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def calibrated(model: str) -> tuple[AttentionPolicy, KvLayout]:
    """The `sparf-page` policy of a model, and its layout. Raises CommandError for a model without one."""
    if model not in calibrated_names():
        raise CommandError(f"model must be one of {', '.join(calibrated_names())}, not {model!r}")
    own = json.loads((_FOLDER / f"{model}.json").read_text())
    layout = KvLayout(**own["layout"] | {"index_format": IndexFormat[own["layout"]["index_format"]]})
    base = AttentionPolicy(
        AttentionMode.SPARF_PAGE, top_k=own["top_k"], local_window=own["local_window"], keep_tail=own["keep_tail"]
    )
    heads: dict[int | tuple[int, int], AttentionPolicy] = {
        (layer, head): replace(base, score_dims=r, top_p=top_p)
        for layer, row in enumerate(zip(own["score_dims"], own["top_p"], strict=True))
        for head, (r, top_p) in enumerate(zip(*row, strict=True))
    }
    return replace(base, overrides=heads), layout


def write_calibrated(model: str, policy: AttentionPolicy, layout: KvLayout, made_by: str) -> Path:
    """Write the file of a model; `policy` has an override for every (layer, KV head). Returns its path."""
    layers = 1 + max(key[0] for key in policy.overrides if isinstance(key, tuple))
    heads = len(policy.overrides) // layers
    table = [[policy.at(layer, head) for head in range(heads)] for layer in range(layers)]
    own = {
        "made_by": made_by,
        "top_k": policy.top_k,
        "local_window": policy.local_window,
        "keep_tail": policy.keep_tail,
        "layout": asdict(layout) | {"index_format": layout.index_format.name},
        "score_dims": [[each.score_dims for each in row] for row in table],
        "top_p": [[each.top_p for each in row] for row in table],
    }
    lines = json.dumps(own, indent=1).replace("\n   ", " ").replace("\n  ]", "]")
    _FOLDER.mkdir(exist_ok=True)
    path = _FOLDER / f"{model}.json"
    path.write_text(lines + "\n")
    return path
