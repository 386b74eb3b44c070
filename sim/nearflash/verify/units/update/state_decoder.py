"""The state decoder: any elements and scales in any format."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers.state import BLOCK_PARAMS, StateFormat
from nearflash.gateware.update.state_decoder import StateDecoder
from nearflash.model.update.state import decode
from nearflash.verify.mutants.observed import ObservedStreams
from nearflash.verify.mutants.target import Target, Vectors
from nearflash.verify.units.update.groups import BLOCKS, LANES, groups

__all__ = ["TARGET", "component", "vectors"]

_DTYPES = {StateFormat.FP32: "<u4", StateFormat.BF16: "<u2", StateFormat.MX8: "<u1"}


def component() -> ObservedStreams:
    """Two lanes of m."""
    return ObservedStreams(StateDecoder(LANES, "m"))


def vectors(rng: np.random.Generator) -> Vectors:
    """Any elements and scales; of fp32 and bf16 no scales."""
    form = StateFormat(rng.choice(["fp32", "bf16", "mx8", "mx8", "mx8"]))
    params = BLOCKS * BLOCK_PARAMS
    elements = rng.integers(0, 256, params * form.element_bytes, np.uint8).view(_DTYPES[form])
    scales = rng.integers(0, 256, BLOCKS if form is StateFormat.MX8 else 0, np.uint8)
    values = decode([elements, scales][: 2 if scales.size else 1], "m", form)
    inputs: dict[str, NDArray[Any]] = {"i": groups(elements), "i_scale": scales, "form": np.array(form.code)}
    return inputs, {"o": groups(values)}


TARGET = Target(component, vectors, part="inner", stalls=("none", "both"), batches=10, cut_cycles=(9, 20, 33))
