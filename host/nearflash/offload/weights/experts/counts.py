"""How often each expert was routed, kept in a file beside the model from one run to the next."""

import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from nearflash.abi.errors import StateError
from nearflash.support.files import write_durably
from nearflash.support.tables import check_fields, check_integers, read_json

__all__ = ["COUNTS_FILE", "ExpertKey", "RoutingCounts"]

COUNTS_FILE = "nearflash-experts.json"
ExpertKey: TypeAlias = tuple[int, int]
"""Index of a mixture among the model's, and number of an expert of it."""


class RoutingCounts:
    """Counts by expert. folder: the model's; None: they are not kept. layers: number and experts of each mixture.

    Old counts weigh half; those of other layers are not used. Raises StateError for a damaged file.
    """

    def __init__(self, folder: Path | None, layers: Sequence[tuple[int, int]]) -> None:
        self._file = None if folder is None else folder / COUNTS_FILE
        self._layers = [list(layer) for layer in layers]
        self._counts: defaultdict[ExpertKey, int] = defaultdict(int)
        if self._file is not None and self._file.exists():
            self._read(self._file)

    def __getitem__(self, key: ExpertKey) -> int:
        return self._counts.get(key, 0)

    def add(self, key: ExpertKey, count: int) -> None:
        """An expert was routed `count` times more."""
        self._counts[key] += count

    def save(self) -> None:
        """Write the file, where the folder can be written to: counts only save time."""
        if self._file is not None:
            rows = [[self[index, expert] for expert in range(experts)]
                    for index, (_, experts) in enumerate(self._layers)]  # fmt: skip
            with suppress(OSError):
                write_durably(self._file, json.dumps({"layers": self._layers, "counts": rows}))

    def _read(self, file: Path) -> None:
        what = f"counts of experts {file}"
        layers, counts = check_fields(what, read_json(file, StateError, "remove it"), layers=list, counts=list)
        if layers != self._layers:
            return
        if len(counts) != len(layers):
            raise StateError(f"{what} must have {len(layers)} rows, not {len(counts)}: remove it")
        for index, row in enumerate(counts):
            for expert, count in enumerate(check_integers(what, row)):
                self._counts[index, expert] = count // 2
