"""Compressed tensors of a layer that cross the link as they are stored: places in its buffer, and expansion behind it.

    buffer   what is read in runs, such tensors among it | what memory had of them | tables | other parameters
    work     the parameters that come out of them, one layer's at a time | a tensor of another dtype than its parameter

The buffer has the link's staging memory beside it; the work area is in the far memory alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearflash.offload.tiers.link import Spans
from nearflash.weights.crossing import CheckedTensor, check_stored, crosses_as_stored, expand_far, table_bytes
from nearflash.weights.sources import Source, SourcePiece
from nearflash.weights.weights_map import TORCH_DTYPES, KeptTensor

__all__ = ["CompressedPiece", "CompressedPieces", "pad_bytes", "source_crosses_as_stored"]

_ALIGNMENT = 64


def pad_bytes(size_bytes: int) -> int:
    """So many bytes, and those up to where the next tensor of a buffer may begin."""
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def source_crosses_as_stored(source: Source) -> bool:
    """Whether all of a parameter is expanded behind the link."""
    return source.converter is None and all(crosses_as_stored(piece.tensor) for piece in source.pieces)


@dataclass(frozen=True)
class CompressedPiece:
    """A stored tensor, the name of its parameter, and where its bytes and its table begin in the buffer."""

    name: str
    piece: SourcePiece
    offset: int
    table_offset: int = 0
    in_place: bool = True
    """Whether it is expanded where it is used: of the parameter's dtype, and in one part of it."""


class CompressedPieces:
    """The pieces of one layer, given with their offsets; their tables lie behind, from `end` on."""

    def __init__(self, sources: Mapping[str, Source], pieces: list[CompressedPiece], end: int) -> None:
        self._pieces: list[CompressedPiece] = []
        for each in pieces:
            in_place = _is_in_place(each.piece, sources[each.name])
            self._pieces.append(replace(each, table_offset=end, in_place=in_place))
            end += pad_bytes(table_bytes(each.piece.tensor))
        self.end = end
        """Of the tables."""
        self._places: dict[str, tuple[int, Source]] = {}
        self.work_bytes = 0
        """Of memory for the parameters."""
        for name, source in sources.items():
            self._places[name] = (self.work_bytes, source)
            self.work_bytes += pad_bytes(source.size_bytes)
        self._converted_at = self.work_bytes
        self.work_bytes += max((each.piece.tensor.dense_bytes for each in self._pieces if not each.in_place), default=0)

    def check(self, memory: Tensor) -> list[CheckedTensor]:
        """Find the rows and blocks of all in the host's buffer, and write their tables there. Raises WeightsError."""
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
            view = view[each.piece.place] if each.piece.place else view
            if each.in_place:
                expand_far(found, data, table, view)
                continue
            tensor = each.piece.tensor
            other = work[self._converted_at :][: tensor.dense_bytes].view(TORCH_DTYPES[tensor.dtype])
            expand_far(found, data, table, other.view(tensor.shape))
            view.copy_(other.view(view.shape))
        return views


def _is_in_place(piece: SourcePiece, source: Source) -> bool:
    parameter = torch.empty(source.shape, dtype=source.dtype, device="meta")
    part = parameter[piece.place] if piece.place else parameter
    return TORCH_DTYPES[piece.tensor.dtype] is source.dtype and part.is_contiguous()
