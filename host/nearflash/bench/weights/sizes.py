"""Bytes of a model's linear weights in every format, against dense ones and against the entropy bound; perplexity.

Perplexities with KV in int4 are of keys and values as offloaded generation stores them
(nearflash.offload.cache.groups), the newest token's among them.

The bound of a lossless 16-bit format: the entropy of which elements are zero, and of each value a bit of sign, the bits
of its significand, and the entropy of its exponent; of each tensor by itself, elements taken as independent.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from nearflash.abi.errors import CommandError
from nearflash.bench.inference.texts import manual_text
from nearflash.offload.cache.groups import decode, encode
from nearflash.weights import expand, open_checkpoint
from nearflash.weights.convert import Written, layer_weights, write_model
from nearflash.weights.perplexity import hold_out, perplexity, windows
from nearflash.weights.pretrained import DTYPES, load_pretrained, token_ids
from nearflash.weights.prune import prune

__all__ = [
    "DTYPE_NAMES",
    "FORMATS",
    "OF",
    "MissingModelError",
    "RoundedCache",
    "SizesSettings",
    "entropy_bound",
    "load_named",
    "measure",
    "settings_of",
]

FORMATS = ("bitmap", "coded-bitmap", "coded", "bitmap-int8", "bitmap-int4", "int8", "int4")
"""A bitmap and 16-bit values; those with coded exponents; exponents in levels; a bitmap and codes; codes alone."""
_UNPRUNED = ("coded", "int8", "int4")
DTYPE_NAMES = ("fp16", "bf16")
OF = "dense 16-bit bytes of the decoder layers' linear weights"
PRUNINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "magnitude": {"method": "magnitude"},
    "wanda": {"method": "wanda"},
    "sparsegpt": {"method": "sparsegpt"},
    "wanda-2:4": {"method": "wanda", "pattern": (2, 4)},
}
"""Options of `prune`; half of the weights each."""
_TOKENS = 512
_HELD_OUT_WINDOWS = 16
"""For the perplexity, at most."""


class MissingModelError(CommandError):
    """A model that is not on this machine."""


@dataclass(frozen=True)
class SizesSettings:
    """Formats, dtypes, texts and folder of a run."""

    formats: tuple[str, ...]
    dtypes: tuple[str, ...]
    texts: tuple[Path, ...]
    windows: int
    path: Path
    """Folder for files."""


def settings_of(format: str) -> dict[str, Any]:
    """Options `format` and `bits` of compress_tensor for one of FORMATS."""
    form, _, bits = format.partition("-int")
    if format.startswith("int"):
        return {"format": "groups", "bits": int(format.removeprefix("int"))}
    return {"format": form, "bits": int(bits)} if bits else {"format": form, "bits": 16}


def load_named(model: str) -> tuple[Any, Any]:
    """Model in fp32, and tokenizer. Raises MissingModelError."""
    try:
        return load_pretrained(model)
    except CommandError as error:
        raise MissingModelError(str(error)) from error


def measure(name: str, settings: SizesSettings) -> Iterator[dict[str, Any]]:
    """A row for each pruning, format and dtype. Perplexities are of weights in fp16, computed in fp32."""
    model, tokenizer = load_named(name)
    model.requires_grad_(False)
    names = layer_weights(model)
    dense = {name: model.get_parameter(name).clone() for name in names}
    texts = [token_ids(tokenizer, file) for file in settings.texts]
    texts = texts or [tokenizer(manual_text(), verbose=False)["input_ids"]]
    calibration, others = hold_out(windows(texts, _TOKENS), settings.windows)
    others = others[:_HELD_OUT_WINDOWS]
    for pruning, options in PRUNINGS.items():
        formats = [name for name in settings.formats
                   if (name in _UNPRUNED if pruning == "none" else not name.startswith("int"))]  # fmt: skip
        if not formats:
            continue
        _restore(model, dense)
        for _ in prune(model, calibration, **options) if options else ():
            pass
        rounded = {name: model.get_parameter(name).half().float() for name in names}
        losses = _losses("perplexity_of_fp16", model, rounded, others, kv=not options)
        for dtype in settings.dtypes:
            for format in formats:
                row = _row(model, names, format, dtype, settings.path, others)
                yield {"pruning": pruning, "format": format, "dtype": dtype, **losses, **row}


def _restore(model: Any, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        model.get_parameter(name).copy_(weight)


def _losses(name: str, model: Any, weights: Mapping[str, Tensor], tokens: Tensor, *, kv: bool) -> dict[str, float]:
    """Perplexity with these weights, under `name`, and with `kv` also with KV in int4; the model stays as it is."""
    before = {name: model.get_parameter(name).clone() for name in weights}
    _restore(model, weights)
    perplexities = {name: perplexity(model, tokens)}
    if kv:
        perplexities[f"{name}_kv_int4"] = perplexity(model, tokens, RoundedCache)
    _restore(model, before)
    return perplexities


class RoundedCache(DynamicCache):
    """Keys and values as groups of 64 codes of 4 bits give them back."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See Cache.update."""
        keys, values = _round_states(key_states), _round_states(value_states)
        held: tuple[Tensor, Tensor] = super().update(keys, values, *args, **kwargs)
        return held


def _round_states(states: Tensor) -> Tensor:
    out = torch.empty_like(states)
    decode(encode(states), out)
    return out


def _row(model: Any, names: list[str], format: str, dtype: str, path: Path, tokens: Tensor) -> dict[str, Any]:
    settings, written = settings_of(format), list[Written]()
    lossless = settings["bits"] == 16
    narrow = {name: model.get_parameter(name).to(DTYPES[dtype]) for name in names}
    with tempfile.TemporaryDirectory(prefix=".nearflash-weights-", dir=path) as folder:
        write_model(model, Path(folder), **settings, dtype=DTYPES[dtype], compressed=names, written=written.append)
        tensors = {name: tensor for name, tensor in open_checkpoint(folder).items() if name in narrow}
        expanded = {name: _expand_tensor(tensor, DTYPES[dtype]) for name, tensor in tensors.items()}
    inner = [tensor for tensor in written if tensor.name in narrow]
    equal = all(torch.equal(_patterns(narrow[name]), _patterns(expanded[name])) for name in names)
    row: dict[str, Any] = {
        "density": sum(tensor.values for tensor in inner) / sum(tensor.elements for tensor in inner),
        "bytes_fraction": sum(tensor.stored_bytes for tensor in inner) / sum(tensor.dense_bytes for tensor in inner),
        "of": OF,
        "forms": dict(sorted(Counter(tensor.form for tensor in inner).items())),
        "lossless": int(equal),
    }
    if lossless:
        bounds = [entropy_bound(weight) for weight in narrow.values()]
        row["entropy_bound_fraction"] = sum(bounds) / sum(8 * tensor.dense_bytes for tensor in inner)
        return row
    if dtype == "fp16":
        row |= _losses("perplexity", model, expanded, tokens, kv=format.startswith("int"))
    return row


def _expand_tensor(tensor: Any, dtype: torch.dtype) -> Tensor:
    out = torch.empty(tensor.shape, dtype=dtype)
    expand(tensor, out=out)
    return out


def _patterns(weight: Tensor) -> Tensor:
    return weight.view(torch.int16)


def entropy_bound(weight: Tensor) -> float:
    """Bits of a lossless format for a tensor of fp16 or bf16, as the module has it."""
    words, mantissa = _patterns(weight).reshape(-1).int() & 0xFFFF, 10 if weight.dtype == torch.float16 else 7
    values = words[words != 0]
    exponents = (values & 0x7FFF) >> mantissa
    shares = torch.tensor([values.numel(), words.numel() - values.numel()])
    positions = words.numel() * _entropy(shares)
    return positions + values.numel() * (1 + mantissa + _entropy(torch.bincount(exponents)))


def _entropy(counts: Tensor) -> float:
    """Bits a symbol of independent symbols that came so many times."""
    shares = counts[counts > 0].double() / max(int(counts.sum()), 1)
    return float(-(shares * shares.log2()).sum())
