"""Compressed tensors of a layer that cross the link as they are stored: places in its buffer, and expansion behind it.

buffer   what is read in runs, such tensors among it | what memory had of them | tables of rows | other parameters
work     the parameters that come out of them, one layer's at a time
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nearflash.offload.tiers.link import Spans
from nearflash.weights.crossing import (
    ROW_BYTES,
    CheckedTensor,
    check_stored,
    crosses_as_stored,
    expand_far,
    table_rows,
)
from nearflash.weights.sources import Source, SourcePiece
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor

__all__ = ["CompressedPiece", "CompressedPieces", "source_crosses_as_stored"]

_ALIGNMENT = 64


def source_crosses_as_stored(source: Source) -> bool:
    """Whether all of a parameter can be expanded in its place, of the dtype that it computes with."""
    if source.converter is not None:
        return False
    parameter = torch.empty(source.shape, dtype=source.dtype, device="meta")
    return all(
        crosses_as_stored(piece.tensor)
        and TORCH_DTYPES[piece.tensor.dtype] is source.dtype
        and (parameter[piece.place] if piece.place else parameter).is_contiguous()
        for piece in source.pieces
    )


@dataclass(frozen=True)
class CompressedPiece:
    """A stored tensor, the name of its parameter, and where its bytes and its table begin in the buffer."""

    name: str
    piece: SourcePiece
    offset: int
    table_offset: int = 0


class CompressedPieces:
    """The pieces of one layer, given with their offsets; their tables lie behind, from `end` on."""

    def __init__(self, sources: Mapping[str, Source], pieces: list[CompressedPiece], end: int) -> None:
        self._pieces: list[CompressedPiece] = []
        for each in pieces:
            self._pieces.append(CompressedPiece(each.name, each.piece, each.offset, end))
            end += -(-table_rows(each.piece.tensor) * ROW_BYTES // _ALIGNMENT) * _ALIGNMENT
        self.end = end
        """Of the tables."""
        self._places: dict[str, tuple[int, Source]] = {}
        self.work_bytes = 0
        """Of memory for the parameters."""
        for name, source in sources.items():
            self._places[name] = (self.work_bytes, source)
            self.work_bytes += -(-source.size_bytes // _ALIGNMENT) * _ALIGNMENT

    def check(self, memory: Tensor) -> list[CheckedTensor]:
        """Find the rows of all of them in the host's buffer, and write their tables there. Raises WeightsError."""
        found = []
        for each in self._pieces:
            tensor = each.piece.tensor
            data = memory[each.offset : each.offset + tensor.stored_bytes].numpy()
            if isinstance(tensor, KeptTensor):
                data[:] = tensor.read()
            checked = check_stored(tensor, data)
            table = torch.from_numpy(checked.table)
            memory[each.table_offset :][: table.nbytes].view(torch.int64).view(table.shape).copy_(table)
            found.append(checked)
        return found

    def spans(self, checked: list[CheckedTensor]) -> Spans:
        """Bytes of the buffer that are wanted for what was found."""
        bounds = []
        for each, found in zip(self._pieces, checked, strict=True):
            bounds += [(each.offset, each.piece.tensor.stored_bytes), (each.table_offset, found.table.nbytes)]
        return [(first, first + size) for first, size in bounds if size]

    def expand(self, memory: Tensor, work: Tensor, checked: list[CheckedTensor]) -> dict[str, Tensor]:
        """The parameters, expanded from a buffer of the far memory into `work` there. Raises WeightsError."""
        views = {
            name: work[at : at + source.size_bytes].view(source.dtype).view(source.shape)
            for name, (at, source) in self._places.items()
        }
        for each, found in zip(self._pieces, checked, strict=True):
            data = memory[each.offset : each.offset + each.piece.tensor.stored_bytes]
            table = memory[each.table_offset :][: found.table.nbytes].view(torch.int64).view(found.table.shape)
            view = views[each.name]
            expand_far(found, data, table, view[each.piece.place] if each.piece.place else view)
        return views
