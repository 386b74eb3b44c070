"""The content of a state, without reading its extents: for people (`nearflash state status`) and for scripts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.storage.state.manifest import StateArray
from nearflash.storage.state.metadata import encode_metadata
from nearflash.storage.state.state_store import StateStore

__all__ = ["FileStatus", "StateStatus"]

_SHOWN_CHARACTERS = 400
"""Of a value of the metadata, as JSON."""


@dataclass(frozen=True)
class FileStatus:
    """One file of a state."""

    path: Path
    size_bytes: int
    extents: int
    """Extents that the file holds."""


@dataclass(frozen=True)
class StateStatus:
    """A state at its last committed step."""

    step: int
    identity: str
    """16 hexadecimal digits drawn at creation."""
    profile: str
    """Operation order of the update."""
    tensors: int
    params: int
    """Parameters of all tensors, without padding."""
    updates: tuple[int, int]
    """Fewest and most updates of a tensor."""
    arrays: tuple[StateArray, ...]
    files: tuple[FileStatus, ...]
    metadata: dict[str, Any]
    """Plain values committed beside the arrays."""

    @classmethod
    def of(cls, store: StateStore) -> "StateStatus":
        """The status of an open store; reads no extent."""
        manifest, steps = store.manifest, store.tensor_steps
        return cls(
            step=store.steps,
            identity=store.identity,
            profile=store.profile,
            tensors=len(manifest.tensors),
            params=sum(tensor.params for tensor in manifest.tensors),
            updates=(min(steps, default=0), max(steps, default=0)),
            arrays=manifest.stored,
            files=tuple(
                FileStatus(path, path.stat().st_size, len(store.extents_of(index)))
                for index, path in enumerate(store.paths)
            ),
            metadata=store.metadata,
        )

    def lines(self) -> Iterator[str]:
        """The status as text, a line for each array and file."""
        updates = " to ".join(map(str, dict.fromkeys(self.updates)))
        yield f"step {self.step} of state {self.identity}, profile {self.profile}"
        yield f"tensors {self.tensors}, parameters {self.params}, updates of a tensor {updates}"
        for array in self.arrays:
            share = f" for {array.params_per_element} parameters" if array.params_per_element > 1 else ""
            name = f", {array.torch_name}" if array.torch_name else ""
            yield f"array {array.name}: {array.element_bytes} bytes{share}{name}"
        extents = sum(file.extents for file in self.files)
        for index, file in enumerate(self.files):
            yield f"file {index}: {file.path}, {file.size_bytes} bytes, {file.extents} of {extents} extents"
        shown = {key: _shorten(value) for key, value in encode_metadata(self.metadata).items()}
        yield f"metadata {json.dumps(shown)}"


def _shorten(value: Any) -> Any:
    """The value, or how long its text is where that fills a screen, as states of random generators do."""
    length = len(json.dumps(value))
    return value if length <= _SHOWN_CHARACTERS else f"({length} characters)"
