"""The state file of one device: master parameters p and the moments m, v, in two slots.

    superblock 0 | superblock 1 | manifest | table 0 | table 1 | slot 0 | slot 1        slot: p, m, v of each extent

A step reads the current slot, writes every extent of the spare one, flushes, then writes the superblock of that slot
and flushes again. Until that last write the file opens at the step before. Since a step rewrites all of p, m and v
anyway, the second slot costs capacity and no bandwidth.

Contract: after any crash the file opens at the last committed step or the one before it, never at a mix. Every extent
has a CRC-32, checked at each read; damage is named by array, tensors and file offset. A file that is foreign, newer,
short or damaged is refused and left as it is. A failed flush ends the use of the open file.

Limits: the checksums are computed by the host's CPU over the memory that is passed in; where that is a window onto
device memory on a board, the bytes cross the host link once more (a checksum unit in the device is to replace it).
"""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import AlignmentError, StateError
from nearflash.abi.formats import FP32
from nearflash.storage.direct import BLOCK_BYTES, DirectFile, Engine, aligned_buffer
from nearflash.storage.layout import Layout
from nearflash.storage.manifest import Extent, Manifest
from nearflash.storage.sealed import crc32, is_blank, is_sealed, seal, unseal

__all__ = ["STATE_VERSION", "StateFile"]

_Checksums = dict[str, dict[int, int]]

STATE_VERSION = 2
"""Raised whenever the file's layout changes meaning; files of a higher version are refused."""


class StateFile:
    """An open, locked state file, at its last committed step. Use `create` or `open`, then `close`."""

    manifest: Manifest
    identity: str
    """16 hexadecimal digits drawn at creation: tells this file and its copies from all others."""
    profile: str
    step: int
    """Committed steps."""
    tensor_steps: tuple[int, ...]
    """Updates that each tensor has had, in the manifest's order."""

    def __init__(self, file: DirectFile, layout: Layout, identity: str, profile: str, manifest_crc: int) -> None:
        """Not for callers: see `create` and `open`."""
        self._file, self._layout, self._manifest_crc = file, layout, manifest_crc
        self.manifest, self.identity, self.profile = layout.manifest, identity, profile
        self.step, self.tensor_steps = -1, (0,) * len(layout.manifest.tensors)
        self._names = [array.name for array in self.manifest.arrays]
        self._checksums: _Checksums = {}
        self._written: _Checksums = {name: {} for name in self._names}
        self._poisoned = False

    # Life

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        *,
        profile: str,
        initial: Callable[[Extent, NDArray[np.float32]], None],
        direct: bool = True,
        engine: Engine | None = None,
    ) -> Self:
        """A new file at step 0: `initial(extent, out)` gives the parameters, the moments are zero.

        The file appears under `path` only when it is complete and durable; before that it is `path`.partial.
        Raises StateError where `path` exists, StorageFullError where the disk has no room (nothing is left behind).
        """
        if path.exists():
            raise StateError(f"{path} must not exist yet; open it, or choose another path")
        partial = path.with_name(path.name + ".partial")
        block = seal("manifest", manifest.to_json())
        layout = Layout(manifest, block.nbytes, manifest.extents)
        file = DirectFile.create(partial, layout.size_bytes, direct=direct, engine=engine)
        try:
            state = cls(file, layout, secrets.token_hex(8), profile, crc32(block))
            for step in (0, 1):
                file.write(layout.superblock_offset(step), aligned_buffer(BLOCK_BYTES))
            file.write(layout.manifest_offset, block)
            state._fill(initial)
            partial.rename(path)
            file.path = path
            _flush_directory(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            file.close()
            raise
        return state

    @classmethod
    def open(cls, path: Path, *, direct: bool = True, engine: Engine | None = None) -> Self:
        """An existing file at its last committed step. Raises StateError, naming what is wrong; changes nothing."""
        if not path.is_file():
            raise StateError(f"{path} must be a state file, not a missing one; check the path or create it")
        file = DirectFile.open(path, direct=direct, engine=engine)
        try:
            return cls._at_last_step(file)
        except BaseException:
            file.close()
            raise

    def close(self) -> None:
        """Release file and lock; what was not committed is forgotten. It may be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._file.path

    # Use

    def read(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Fill `memory` (page aligned, extent.size_bytes long) with the committed array. Raises StateError."""
        self._check_length(array, extent, memory)
        self._file.read(self._layout.array_offset(self.step, array, extent), memory)
        if crc32(memory) != self._checksums[array][extent.index]:
            raise StateError(self._damage(array, extent))

    def read_array(self, array: str) -> NDArray[np.float32]:
        """A whole committed array, (manifest.params,). Raises StateError."""
        memory = aligned_buffer(self.manifest.params * FP32.bytes)
        for extent in self.manifest.extents:
            start = extent.start * FP32.bytes
            self.read(array, extent, memory[start : start + extent.size_bytes])
        return memory.view(np.float32)

    def write(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Write `memory` to the spare slot; it counts from `commit` on. Raises StorageFullError, StateError."""
        self._check_length(array, extent, memory)
        self._check_usable()
        self._file.write(self._layout.array_offset(self.step + 1, array, extent), memory)
        self._written[array][extent.index] = crc32(memory)

    def commit(self, tensor_steps: Sequence[int]) -> None:
        """Make the spare slot the current one, durably. Raises StateError where extents were not written."""
        self._check_usable()
        missing = len(self._names) * len(self.manifest.extents) - sum(map(len, self._written.values()))
        if missing:
            raise StateError(f"every extent must be written before a commit; {missing} are not")
        step = self.step + 1
        body = {"tensor_steps": list(tensor_steps),
                **{a: [self._written[a][e.index] for e in self.manifest.extents] for a in self._names}}  # fmt: skip
        table = seal("table", body, self._layout.table_bytes)
        superblock = seal("superblock", self._superblock(step, crc32(table)), BLOCK_BYTES)
        self._file.write(self._layout.table_offset(step), table)
        self._poisoned = True  # A failed flush leaves unknown what the drive holds: only opening again can tell.
        self._file.flush()
        self._file.write(self._layout.superblock_offset(step), superblock)
        self._file.flush()
        self._poisoned = False
        self.step, self.tensor_steps, self._checksums = step, tuple(tensor_steps), self._written
        self.discard()

    def discard(self) -> None:
        """Forget what was written since the last commit."""
        self._written = {name: {} for name in self._names}

    def verify(self) -> list[str]:
        """Read everything that is committed; one message for each damaged extent."""
        found = []
        for extent in self.manifest.extents:
            for array in self.manifest.arrays:
                try:
                    self.read(array.name, extent, aligned_buffer(array.extent_bytes(extent)))
                except StateError as error:
                    found.append(str(error))
        return found

    # Opening and creating

    def _fill(self, initial: Callable[[Extent, NDArray[np.float32]], None]) -> None:
        for extent in self.manifest.extents:
            for array in self.manifest.arrays[1:]:
                self.write(array.name, extent, aligned_buffer(array.extent_bytes(extent)))
            memory = aligned_buffer(extent.size_bytes)
            initial(extent, memory.view(np.float32))
            self.write("p", extent, memory)
        self.commit(self.tensor_steps)

    @classmethod
    def _at_last_step(cls, file: DirectFile) -> Self:
        if file.size_bytes < 3 * BLOCK_BYTES or file.size_bytes % BLOCK_BYTES:
            raise StateError(
                f"{file.path} must be a whole number of {BLOCK_BYTES}-byte blocks, at least 3, not {file.size_bytes} "
                "bytes; it was cut short or is no state file: restore it from a copy"
            )
        blocks = [_read(file, slot * BLOCK_BYTES, BLOCK_BYTES) for slot in (0, 1)]
        if not any(map(is_sealed, blocks)):
            raise StateError(f"{file.path} must begin with a nearflash superblock; it is another kind of file")
        bodies = []
        for slot, block in enumerate(blocks):
            try:
                body = unseal("superblock", block)
            except StateError:
                continue
            cls._check_version(file.path, body)
            if body["step"] % 2 == slot:
                bodies.append(body)
        if not bodies:
            raise StateError(f"{file.path}: both superblocks are damaged; restore the file from a copy")
        last = max(bodies, key=lambda body: body["step"])
        state = cls._load(file, last)
        # Where its predecessor is gone (at step 0: where the other block is not blank) a newer superblock may have been
        # lost after this slot was written over: then only the checksums can tell.
        whole = is_blank(blocks[1]) if last["step"] == 0 else last["step"] - 1 in [body["step"] for body in bodies]
        if not whole and (damage := state.verify()):
            raise StateError(f"one superblock is damaged and the step of the other was written over: {damage[0]}")
        return state

    @staticmethod
    def _check_version(path: Path, body: dict[str, Any]) -> None:
        for name, ours in (("version", STATE_VERSION), ("abi", ABI_VERSION)):
            if body[name] != ours:
                raise StateError(
                    f"{path} must have {name} {ours}, not {body[name]!r}; use the nearflash release that wrote it"
                )

    @classmethod
    def _load(cls, file: DirectFile, body: dict[str, Any]) -> Self:
        checksum = body["manifest_crc32"]
        block = _read(file, Layout.manifest_offset, body["manifest_bytes"])
        cls._check_block(file.path, "manifest", Layout.manifest_offset, block, checksum)
        manifest = Manifest.from_json(unseal("manifest", block))
        layout = Layout(manifest, block.nbytes, manifest.extents)
        if file.size_bytes != layout.size_bytes:
            raise StateError(
                f"{file.path} must have {layout.size_bytes} bytes, not {file.size_bytes}; restore it from a copy"
            )
        state = cls(file, layout, body["identity"], body["profile"], checksum)
        state.step = body["step"]
        table = _read(file, layout.table_offset(state.step), layout.table_bytes)
        cls._check_block(file.path, "checksum table", layout.table_offset(state.step), table, body["table_crc32"])
        content = unseal("table", table)
        state.tensor_steps = tuple(content["tensor_steps"])
        state._checksums = {array: dict(enumerate(content[array])) for array in state._names}
        return state

    def _superblock(self, step: int, table_crc: int) -> dict[str, Any]:
        return {"version": STATE_VERSION, "abi": ABI_VERSION, "identity": self.identity, "step": step,
                "profile": self.profile, "manifest_bytes": self._layout.manifest_bytes,
                "manifest_crc32": self._manifest_crc, "table_crc32": table_crc}  # fmt: skip

    # Checks

    @staticmethod
    def _check_block(path: Path, name: str, offset: int, block: NDArray[np.uint8], checksum: int) -> None:
        if crc32(block) != checksum:
            raise StateError(f"{path}: the {name} at offset {offset} is damaged; restore the file from a copy")

    def _check_usable(self) -> None:
        if self._poisoned:
            raise StateError(f"{self.path}: a flush failed, so the drive's contents are unknown; close and open again")

    def _check_length(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        size_bytes = self.manifest.array(array).extent_bytes(extent)
        if memory.nbytes != size_bytes:
            raise AlignmentError(f"memory must have the extent's {size_bytes} bytes, not {memory.nbytes}")

    def _damage(self, array: str, extent: Extent) -> str:
        offset = self._layout.array_offset(self.step, array, extent)
        return (
            f"{self.path}: array {array} of step {self.step} is damaged in tensors {self.manifest.names_in(extent)} "
            f"(parameters [{extent.start}, {extent.stop})), file offset {offset}; restore the file from a copy"
        )


def _read(file: DirectFile, offset: int, size_bytes: int) -> NDArray[np.uint8]:
    memory = aligned_buffer(size_bytes)
    file.read(offset, memory)
    return memory


def _flush_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
