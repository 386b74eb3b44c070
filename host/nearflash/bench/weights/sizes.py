"""Bytes of a model's linear weights in every format, against dense ones and against the entropy bound; perplexity.

Perplexities with KV in int4 are of keys and values as offloaded generation stores them
(nearflash.offload.cache.groups), the newest token's among them.

The bound of a lossless 16-bit format: the entropy of which elements are zero, and of each value a bit of sign, the bits
of its significand, and the entropy of its exponent; of each tensor by itself, elements taken as independent.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from nearflash.abi.errors import CommandError
from nearflash.bench.inference.texts import read_texts
from nearflash.offload.cache.groups import decode, encode
from nearflash.support.threads import set_ieee_arithmetic
from nearflash.weights.compress import compress_tensor
from nearflash.weights.convert import layer_weights
from nearflash.weights.expand import expand_packed
from nearflash.weights.file import PackedTensor
from nearflash.weights.perplexity import hold_out, perplexity, windows
from nearflash.weights.pretrained import DTYPES, load_pretrained
from nearflash.weights.prune import prune
from nearflash.weights.rans import pack_rans

__all__ = [
    "DTYPE_NAMES",
    "FORMATS",
    "OF",
    "ZSTD_LEVEL",
    "MissingModelError",
    "RoundedCache",
    "SizesSettings",
    "entropy_bound",
    "load_named",
    "measure",
    "measure_bytes",
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
ZSTD_LEVEL = 3
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
    texts = windows(read_texts(tokenizer, settings.texts), _TOKENS)
    calibration, others = hold_out(texts, settings.windows)
    others = others[:_HELD_OUT_WINDOWS]
    for pruning, options in PRUNINGS.items():
        formats = _list_formats(settings, pruning)
        if not formats:
            continue
        _restore(model, dense)
        for _ in prune(model, calibration, **options) if options else ():
            pass
        rounded = {name: model.get_parameter(name).half().float() for name in names}
        losses = _losses("perplexity_of_fp16", model, rounded, others, kv=not options)
        for dtype in settings.dtypes:
            narrow, bound = _narrow(model, names, dtype)
            for format in formats:
                row = _row(model, narrow, format, bound, others)
                yield {"pruning": pruning, "format": format, "dtype": dtype, **losses, **row}


def _list_formats(settings: SizesSettings, pruning: str) -> list[str]:
    return [name for name in settings.formats
            if (name in _UNPRUNED if pruning == "none" else not name.startswith("int"))]  # fmt: skip


def _narrow(model: Any, names: Iterable[str], dtype: str) -> tuple[dict[str, Tensor], float]:
    """Weights in a dtype, and their entropy over their bits."""
    narrow = {name: model.get_parameter(name).to(DTYPES[dtype]) for name in names}
    return narrow, sum(map(entropy_bound, narrow.values())) / sum(8 * weight.nbytes for weight in narrow.values())


def measure_bytes(name: str, settings: SizesSettings) -> Iterator[dict[str, Any]]:
    """A row for each format, ours and other packages', and dtype: of weights as they are, and half pruned by magnitude.

    None needs texts. Raises MissingModelError.
    """
    model, _ = load_named(name)
    model.requires_grad_(False)
    names = layer_weights(model)
    for pruning in ("none", "magnitude"):
        formats = _list_formats(settings, pruning)
        for _ in prune(model, None, **PRUNINGS[pruning]) if PRUNINGS[pruning] else ():
            pass
        for dtype in settings.dtypes:
            narrow, bound = _narrow(model, names, dtype)
            ours = ({"format": format, **_bytes_row(narrow, settings_of(format))[0]} for format in formats)
            for row in (*ours, *_peer_rows(narrow, dtype)):
                yield {"pruning": pruning, "dtype": dtype, "of": OF, "entropy_bound_fraction": bound, **row}
        if "coded" in formats:
            yield from ({"pruning": pruning, **row} for row in _fp8_rows([model.get_parameter(name) for name in names]))


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


def _row(model: Any, narrow: Mapping[str, Tensor], format: str, bound: float, tokens: Tensor) -> dict[str, Any]:
    settings = settings_of(format)
    row, expanded = _bytes_row(narrow, settings)
    if settings["bits"] == 16:
        row["entropy_bound_fraction"] = bound
    elif next(iter(narrow.values())).dtype == torch.float16:
        row |= _losses("perplexity", model, expanded, tokens, kv=format.startswith("int"))
    return row


def _bytes_row(narrow: Mapping[str, Tensor], settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Bytes of weights in a format, and what they expand to."""
    with ThreadPoolExecutor(os.cpu_count() or 1, initializer=set_ieee_arithmetic) as pool:
        outcomes = list(pool.map(partial(_pack_and_expand, settings), narrow.items()))
    stored = sum(len(packed.data) for packed, _ in outcomes)
    expanded = {packed.name: weight for packed, weight in outcomes}
    elements = sum(weight.numel() for weight in narrow.values())
    return {
        "density": sum(int(torch.count_nonzero(weight)) for weight in narrow.values()) / elements,
        "bytes_fraction": stored / sum(weight.nbytes for weight in narrow.values()),
        "of": OF,
        "forms": dict(sorted(Counter(packed.form for packed, _ in outcomes).items())),
        "lossless": int(all(torch.equal(_patterns(narrow[name]), _patterns(expanded[name])) for name in narrow)),
    }, expanded


def _pack_and_expand(settings: Mapping[str, Any], named: tuple[str, Tensor]) -> tuple[PackedTensor, Tensor]:
    """A weight packed, and what that expands to."""
    name, weight = named
    packed = compress_tensor(name, _array(weight), **settings)
    return packed, torch.from_numpy(expand_packed(packed)).view(weight.dtype)


def _array(weight: Tensor) -> NDArray[Any]:
    words: NDArray[Any] = _patterns(weight.contiguous()).numpy()
    return words.view(np.float16 if weight.dtype == torch.float16 else np.uint16)


def _peer_rows(narrow: Mapping[str, Tensor], dtype: str) -> Iterator[dict[str, Any]]:
    """Bytes by other packages, of those that are installed."""
    peers = {}
    if find_spec("zstandard"):
        from zstandard import ZstdCompressor

        peers[f"zstd-{ZSTD_LEVEL}"] = ZstdCompressor(ZSTD_LEVEL).compress
    if find_spec("zipnn"):
        from zipnn import ZipNN

        codec = ZipNN(bytearray_dtype={"bf16": "bfloat16", "fp16": "float16"}[dtype], input_format="byte")
        peers["zipnn"] = lambda data: codec.compress(bytearray(data))
    for name, compress in peers.items():
        stored = sum(len(compress(_array(weight).tobytes())) for weight in narrow.values())
        yield {"format": name, "bytes_fraction": stored / sum(weight.nbytes for weight in narrow.values())}


def _fp8_rows(weights: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """Bytes of weights cast to fp8 with a scale a row, coded, of their fp8 bytes; the bound is their bytes' entropy."""
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        stored, bound, elements = 0, 0.0, 0
        for weight in weights:
            largest = weight.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            values = (weight * (torch.finfo(dtype).max / largest)).to(dtype).view(torch.uint8).reshape(-1)
            stored, elements = stored + len(pack_rans(values.numpy())), elements + values.numel()
            bound += values.numel() * _entropy(torch.bincount(values.int(), minlength=256))
        yield {"format": "coded", "dtype": f"fp8-{name}", "of": "dense fp8 bytes, without their scales",
               "bytes_fraction": stored / elements, "entropy_bound_fraction": bound / (8 * elements)}  # fmt: skip


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
