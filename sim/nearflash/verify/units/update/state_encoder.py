"""The state encoder: one command of some blocks in any format, across the end of a tile."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers.state import BLOCK_PARAMS, TILE_PARAMS, StateFormat
from nearflash.gateware.update.state_encoder import StateEncoder
from nearflash.model.update.state import dither, encode
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target, Vectors
from nearflash.verify.units.update.groups import BLOCKS, LANES, groups

__all__ = ["TARGET", "component", "vectors"]

_NAN = 0x7FC00000


def component() -> ObservedStreams:
    """Two lanes of m: its sign is one thing more than v has."""
    return ObservedStreams(StateEncoder(LANES, "m"))


def vectors(rng: np.random.Generator) -> Vectors:
    """Blocks of wide and of near exponents; zeros, infinities, NaN; groups that are not to be written."""
    form = StateFormat(rng.choice(["fp32", "bf16", "mx8", "mx8", "mx8"]))
    bits, step = _values(rng), int(rng.integers(1, 1 << 32))
    first = (int(rng.integers(1 << 27)) << 13) + TILE_PARAMS - BLOCK_PARAMS * int(rng.integers(1, BLOCKS))
    if form is StateFormat.BF16:
        first += int(rng.integers(BLOCK_PARAMS))
    stored = encode(bits.view(np.float32), "m", form, dither("m", step, first, bits.size))
    strobes = rng.choice([0, 1, 2, 3], bits.size // LANES, p=[0.1, 0.1, 0.1, 0.7]).tolist()
    outputs = {"o": groups(stored[0], strobes), "o_scale": np.zeros(0, np.uint16)}
    if form is StateFormat.MX8:
        scales = stored[1].astype(np.uint16)
        ends = np.array(strobes[BLOCK_PARAMS // LANES - 1 :: BLOCK_PARAMS // LANES])
        outputs["o_scale"] = scales | (ends == 3).astype(np.uint16) << 8
        outputs["o_scale"][-1] |= 1 << 9
    inputs: dict[str, NDArray[Any]] = {
        "i_command": words_from_integers([step | first << 32], 72),
        "i": groups(bits, strobes),
        "form": np.array(form.code),
    }
    return inputs, outputs


def _values(rng: np.random.Generator) -> NDArray[np.uint32]:
    highest = rng.integers(0, 256, (BLOCKS, 1))
    spread = rng.choice([0, 1, 4, 16, 40, 255], (BLOCKS, 1))
    fields = (highest - rng.integers(0, 256, (BLOCKS, BLOCK_PARAMS)) % (spread + 1)).clip(0, 255)
    bits = fields << 23 | rng.integers(0, 1 << 23, fields.shape) | rng.integers(0, 2, fields.shape) << 31
    bits = np.where(rng.random(fields.shape) < 0.1, bits & 0xFF800000, bits)
    bits = np.where(rng.random(fields.shape) < 0.05, bits & 1 << 31, bits)
    bits = np.where((bits >> 23 & 0xFF == 255) & (bits & 0x7FFFFF != 0), _NAN, bits)
    return bits.reshape(-1).astype(np.uint32)


TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=12, cut_cycles=(9, 20, 33))
