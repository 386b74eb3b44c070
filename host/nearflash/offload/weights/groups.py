"""A layer's matrices in groups of 64 codes of 4 bits. Source: FlexGen (arXiv 2303.06865), section 4.4."""

from dataclasses import replace

import numpy as np
import torch

from nearflash.abi.bitmap import SCALE_COLUMNS
from nearflash.abi.errors import CommandError
from nearflash.weights.file import WeightsTensor
from nearflash.weights.groups import pack_groups
from nearflash.weights.quantize import quantize
from nearflash.weights.sources import Source, SourcePiece
from nearflash.weights.weights_map import KeptTensor

__all__ = ["quantize_source"]


def quantize_source(source: Source, *, read: bool) -> Source:
    """The source with its matrices as codes of 4 bits; vectors, and what is stored so, stay as they are.

    read: read it and quantise it now; else it must be stored so. Raises CommandError where it is not, NonFiniteError
    for NaN or infinity, WeightsError for damage.
    """
    if len(source.shape) < 2 or source.shape[-1] < SCALE_COLUMNS:
        return source
    if source.converter is None and all(piece.tensor.form == "int4" for piece in source.pieces):
        return source
    if not read:
        raise CommandError(
            f"weight_bits of a layer on disk must be how it is stored, but {source.name!r} is not int4: compress the "
            "checkpoint (nearflash compress --format groups --bits 4), or keep its layer in memory"
        )
    value = torch.empty(source.shape, dtype=source.dtype)
    source.read_into(value)
    half = value if source.dtype in (torch.float16, torch.bfloat16) else value.to(torch.float16)
    patterns = half.view(torch.int16).numpy().view(np.float16 if half.dtype is torch.float16 else np.uint16)
    matrix = patterns.reshape(-1, source.shape[-1])
    data = np.frombuffer(pack_groups(quantize(matrix, 4, present=np.ones(matrix.shape, np.bool_))), np.uint8)
    dtype = "F16" if half.dtype is torch.float16 else "BF16"
    stored = source.pieces[0].tensor
    described = WeightsTensor(source.name, dtype, source.shape, "int4", stored.file, stored.offset, len(data), None)
    codes = KeptTensor(described, data)
    return replace(source, pieces=(SourcePiece(codes),), converter=None, patterns=())
