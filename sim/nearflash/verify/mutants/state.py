"""Vectors of the converters of optimizer state: one command of some blocks in any format, across the end of a tile."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers.state import BLOCK_PARAMS, TILE_PARAMS, StateFormat
from nearflash.gateware.update.state_decoder import StateDecoder
from nearflash.gateware.update.state_encoder import StateEncoder
from nearflash.model.update.state import decode, dither, encode
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import ObservedStreams

__all__ = ["decoder", "decoder_vectors", "encoder", "encoder_vectors"]

_LANES = 2
_BLOCKS = 40
_NAN = 0x7FC00000
_DTYPES = {StateFormat.FP32: "<u4", StateFormat.BF16: "<u2", StateFormat.MX8: "<u1"}

_Vectors = tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]


def encoder() -> ObservedStreams:
    """Two lanes of m: its sign is one thing more than v has."""
    return ObservedStreams(StateEncoder(_LANES, "m"))


def decoder() -> ObservedStreams:
    """Two lanes of m."""
    return ObservedStreams(StateDecoder(_LANES, "m"))


def encoder_vectors(rng: np.random.Generator) -> _Vectors:
    """Blocks of wide and of near exponents; zeros, infinities, NaN; groups that are not to be written."""
    form = StateFormat(rng.choice(["fp32", "bf16", "mx8", "mx8", "mx8"]))
    bits, step = _values(rng), int(rng.integers(1, 1 << 32))
    first = (int(rng.integers(1 << 27)) << 13) + TILE_PARAMS - BLOCK_PARAMS * int(rng.integers(1, _BLOCKS))
    if form is StateFormat.BF16:
        first += int(rng.integers(BLOCK_PARAMS))
    stored = encode(bits.view(np.float32), "m", form, dither("m", step, first, bits.size))
    strobes = rng.choice([0, 1, 2, 3], bits.size // _LANES, p=[0.1, 0.1, 0.1, 0.7]).tolist()
    outputs = {"o": _groups(stored[0], strobes), "o_scale": np.zeros(0, np.uint16)}
    if form is StateFormat.MX8:
        scales = stored[1].astype(np.uint16)
        ends = np.array(strobes[BLOCK_PARAMS // _LANES - 1 :: BLOCK_PARAMS // _LANES])
        outputs["o_scale"] = scales | (ends == 3).astype(np.uint16) << 8
        outputs["o_scale"][-1] |= 1 << 9
    inputs: dict[str, NDArray[Any]] = {
        "i_command": words_from_integers([step | first << 32], 72),
        "i": _groups(bits, strobes),
        "form": np.array(form.code),
    }
    return inputs, outputs


def decoder_vectors(rng: np.random.Generator) -> _Vectors:
    """Any elements and scales; of fp32 and bf16 no scales."""
    form = StateFormat(rng.choice(["fp32", "bf16", "mx8", "mx8", "mx8"]))
    params = _BLOCKS * BLOCK_PARAMS
    elements = rng.integers(0, 256, params * form.element_bytes, np.uint8).view(_DTYPES[form])
    scales = rng.integers(0, 256, _BLOCKS if form is StateFormat.MX8 else 0, np.uint8)
    values = decode([elements, scales][: 2 if scales.size else 1], "m", form)
    inputs: dict[str, NDArray[Any]] = {"i": _groups(elements), "i_scale": scales, "form": np.array(form.code)}
    return inputs, {"o": _groups(values)}


def _values(rng: np.random.Generator) -> NDArray[np.uint32]:
    highest = rng.integers(0, 256, (_BLOCKS, 1))
    spread = rng.choice([0, 1, 4, 16, 40, 255], (_BLOCKS, 1))
    fields = (highest - rng.integers(0, 256, (_BLOCKS, BLOCK_PARAMS)) % (spread + 1)).clip(0, 255)
    bits = fields << 23 | rng.integers(0, 1 << 23, fields.shape) | rng.integers(0, 2, fields.shape) << 31
    bits = np.where(rng.random(fields.shape) < 0.1, bits & 0xFF800000, bits)
    bits = np.where(rng.random(fields.shape) < 0.05, bits & 1 << 31, bits)
    bits = np.where((bits >> 23 & 0xFF == 255) & (bits & 0x7FFFFF != 0), _NAN, bits)
    return bits.reshape(-1).astype(np.uint32)


def _groups(elements: NDArray[Any], strobes: list[int] | None = None) -> NDArray[Any]:
    """Groups of elements, of strobes where there are any, and `last`."""
    rows = [int.from_bytes(row.tobytes(), "little") for row in np.ascontiguousarray(elements).reshape(-1, _LANES)]
    bits = 32 * _LANES
    if strobes is not None:
        rows = [row | strb << bits for row, strb in zip(rows, strobes, strict=True)]
        bits += _LANES
    rows[-1] |= 1 << bits
    return words_from_integers(rows, bits + 1)
