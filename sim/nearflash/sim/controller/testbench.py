"""The NAND controller with a model of NAND behind it: page requests and operations in, what they gave out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import RAW_BYTES
from nearflash.gateware.nand.controller import NandController
from nearflash.gateware.nand.interfaces import page_header, page_request
from nearflash.gateware.nand.link import RAW_BEATS, RawBeat
from nearflash.gateware.nand.operation import NandOperation, NandResult
from nearflash.sim.controller.linked import NandLinkedUnit
from nearflash.sim.nand.channel import NandModel
from nearflash.sim.nand.parts import NandPart
from nearflash.sim.verilator.records import pack, unpack

__all__ = ["Answer", "ControllerBench", "Operation", "PageRead"]

_TAG_BITS = 20
"""Of a request's tag: its number."""


@dataclass(frozen=True)
class PageRead:
    """A page request: the page (or both pages) at `row`, the first one on `lun`."""

    lun: int
    row: int
    codewords: int
    """Mask, by number."""


@dataclass
class Answer:
    """What came for one request."""

    index: int
    """Of the request among those given."""
    codewords: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    """Raw bytes by number, in the order in which they came."""
    failed: set[int] = field(default_factory=set)
    """Numbers of those that the lun did not give."""


@dataclass(frozen=True)
class Operation:
    """A page to program with `data`, or (without) a block to erase."""

    lun: int
    row: int
    data: NDArray[np.uint8] | None = None
    """Raw codewords."""
    begins: bool = True
    """Its data are asked for; not so where its lun is known to be dead."""


class ControllerBench:
    """A Verilated NandController; `options` are those of NandController."""

    def __init__(self, part: NandPart, luns: int, clock_hz: int, name: str, **options: Any) -> None:
        self.model = NandModel(part, luns, clock_hz)
        self.lun = NandLinkedUnit(
            NandController(luns, part.timing, clock_hz, tag=_TAG_BITS, **options), name, self.model
        )
        self.channel = self.lun.channels[0]

    def run(
        self,
        reads: Sequence[PageRead],
        operations: Sequence[Operation] = (),
        *,
        page_codewords: int = 8,
        **options: Any,
    ) -> tuple[list[Answer], list[dict[str, int]]]:
        """Answers in the order in which they came, and the operations' results; `options` are those of StreamUnit.run.

        Raises ValueError where headers and codewords do not belong together, NandViolation for broken rules.
        """
        total = sum(read.codewords.bit_count() for read in reads)
        inputs: dict[str, Any] = {}
        if reads:
            columns = {
                "tag": range(len(reads)),
                "codewords": [read.codewords for read in reads],
                "page_log2": [page_codewords.bit_length() - 1] * len(reads),
                "row": [read.row for read in reads],
                "lun": [read.lun for read in reads],
            }
            inputs["i"] = pack(page_request(_TAG_BITS), columns)
        if operations:
            inputs["operations"] = _operations(operations)
            beats = [one.data.reshape(-1).view(np.uint64) for one in operations if one.data is not None and one.begins]
            inputs["program"] = np.concatenate(beats) if beats else ()
        outputs = {"header": len(reads), "codewords": total * RAW_BEATS, "results": len(operations)}
        given = self.lun.run(inputs, outputs, **options)
        results = [
            {
                name: int(given["results"][at]) >> bits.offset & (1 << bits.width) - 1
                for name, bits in NandResult.as_shape()
            }
            for at in range(len(operations))
        ]
        return _answers(given["header"], given["codewords"], reads, page_codewords), results


def _operations(operations: Sequence[Operation]) -> NDArray[np.uint64]:
    layout = NandOperation.as_shape()
    values = []
    for number, one in enumerate(operations):
        codewords = 0 if one.data is None else one.data.size // RAW_BYTES
        columns = {"erase": one.data is None, "lun": one.lun, "row": one.row, "codewords": codewords}
        columns["number"] = number
        values.append(sum(int(value) << layout[name].offset for name, value in columns.items()))
    return np.array(values, np.uint64)


def _answers(
    header: NDArray[np.uint32], codewords: NDArray[np.uint32], reads: Sequence[PageRead], page_codewords: int
) -> list[Answer]:
    """Sorts codewords to headers and checks every field."""
    headers, beats = unpack(page_header(_TAG_BITS), header), unpack(RawBeat, codewords)
    data = beats["data"].reshape(-1, RAW_BEATS)
    place_of_beat = np.arange(len(beats["data"])) % RAW_BEATS
    _equal("first", beats["first"], place_of_beat == 0)
    _equal("last", beats["last"], place_of_beat == RAW_BEATS - 1)
    fields = {
        name: column.reshape(-1, RAW_BEATS) for name, column in beats.items() if name not in ("data", "first", "last")
    }
    for name, column in fields.items():
        _equal(name, column, column[:, :1])
    answers, at = [], 0
    for position in range(len(header)):
        answer = Answer(int(headers["tag"][position]))
        read = reads[answer.index]
        numbers = [number for number in range(64) if read.codewords >> number & 1]
        for number in numbers:
            wanted = {
                "number": number, "place": number % page_codewords, "lun": read.lun ^ number // page_codewords,
                "row": read.row, "final": number == numbers[-1],
            }  # fmt: skip
            for name, value in wanted.items():
                _equal(name, fields[name][at, :1], value)
            answer.codewords[number] = data[at].view(np.uint8)
            if fields["failed"][at, 0]:
                answer.failed.add(number)
            at += 1
        answers.append(answer)
    return answers


def _equal(name: str, found: Any, wanted: Any) -> None:
    if (np.asarray(found) != np.asarray(wanted)).any():
        raise ValueError(f"{name} of the raw codewords must be {wanted}, not {found}")
