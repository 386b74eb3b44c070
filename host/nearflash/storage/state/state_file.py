"""One file of a state: its extents, in two slots. `StateStore` keeps the files of a state in step.

    superblock 0 | superblock 1 | manifest | table 0 | table 1 | slot 0 | slot 1 | log   slot: p, m, v of each extent

The manifest block holds the manifest of the whole state, the stripe and the file's place in it. The table of a step
holds the slot and the checksum of each extent of each array, the tensors' step counts and `metadata`. A step writes an
extent into the slot that the step before does not use for it; one that it does not change stays where it is. Of the
weights of a split master it may write what changes alone, into the log, behind what the step before has there.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import AlignmentError, LostStepWarning, StateError, StreamError
from nearflash.abi.optimizers import MasterFormat
from nearflash.storage.io.backend import BLOCK_BYTES, IoBackend
from nearflash.storage.io.checksum import crc32c
from nearflash.storage.io.direct import DirectFile, aligned_buffer, partial_of
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.storage.io.sealed import seal, unseal
from nearflash.storage.state.layout import StateLayout
from nearflash.storage.state.manifest import Extent, Manifest
from nearflash.storage.state.master import join_master, split_master
from nearflash.storage.state.metadata import decode_metadata
from nearflash.storage.state.stripe import Stripe
from nearflash.storage.state.superblock import Stamp, Superblock, last_and_previous, void_block
from nearflash.storage.state.weight_log import WHOLE_STEPS, apply_changes, find_changes
from nearflash.support.files import give_name, refuse_link
from nearflash.support.tables import check_fields, check_integers

__all__ = ["StateFile", "Version"]


class Placed(NamedTuple):
    """The slot of an extent of an array, and its checksum."""

    slot: int
    """0 or 1."""
    crc32c: int
    logged_bytes: int = 0
    """Of the log, that lead from what is in the slot to what has this checksum."""


@dataclass(frozen=True)
class Version:
    """One step of a file: its superblock and what its table holds."""

    superblock: Superblock
    tensor_steps: tuple[int, ...]
    extents: Mapping[tuple[str, int], Placed]
    """By array and extent index."""
    metadata: Mapping[str, Any]
    """As `encode_metadata` gives it."""

    @property
    def stamp(self) -> Stamp:
        """Identity, profile, step and commit."""
        return self.superblock.stamp


class StateFile:
    """An open, locked file at one of its committed steps. Use `create` or `open`, then `close`."""

    def __init__(
        self, file: DirectFile, manifest: Manifest, stripe: Stripe, index: int, block: NDArray[np.uint8]
    ) -> None:
        """Not for callers: see `create` and `open`."""
        self._file, self.manifest, self.stripe, self.index = file, manifest, stripe, index
        self.layout = _layout(manifest, stripe, index, block)
        self._manifest_crc32c = crc32c(block)
        self._version: Version | None = None
        self._prepared: Version | None = None
        self._other: Superblock | None = None  # of the step before, in the other slot
        self._undone = False  # the other slot's superblock is that of a step that no longer counts
        self._written: dict[tuple[str, int], Placed] = {}
        self._whole_steps: dict[int, int] = {}
        """Steps that still write the weights whole, by extent."""

    # Life

    @classmethod
    def create(
        cls,
        path: Path,
        manifest: Manifest,
        stripe: Stripe,
        index: int,
        *,
        direct: bool = True,
        backend: IoBackend | None = None,
    ) -> Self:
        """A new file without a committed step, under the name `path`.partial until `publish`.

        Raises StorageFullError where the disk has no room (nothing is left then), StateError.
        """
        block = seal("manifest", {"manifest": manifest.to_json(), "stripe_ratio": stripe.ratio, "file": index})
        partial, size_bytes = partial_of(path), _layout(manifest, stripe, index, block).size_bytes
        file = DirectFile.create(partial, size_bytes, direct=direct, backend=backend)
        try:
            for offset in (0, BLOCK_BYTES):
                file.write(offset, aligned_buffer(BLOCK_BYTES))
            file.write(StateLayout.manifest_offset, block)
        except BaseException:
            file.close()
            partial.unlink(missing_ok=True)
            raise
        return cls(file, manifest, stripe, index, block)

    def has_its_name(self) -> bool:
        """Whether its path is still this file's, and no other's."""
        return self._file.has_its_name()

    def publish(self, path: Path) -> None:
        """Give the file its name, durably. Raises StateError, also where another file took the name meanwhile."""
        self._name(path, keep_existing=True)

    def replace(self, path: Path) -> None:
        """Take the place of the file of that name, durably. Raises StateError."""
        self._name(path, keep_existing=False)

    def _name(self, path: Path, *, keep_existing: bool) -> None:
        try:
            give_name(self.path, path, keep_existing=keep_existing)
        except FileExistsError as error:
            raise StateError(f"{path} must not exist yet: another one was written meanwhile") from error
        except OSError as error:
            raise StateError(f"{path} cannot get its name ({error.strerror}): choose another place") from error
        self._file.path = path

    @classmethod
    def open(cls, path: Path, *, direct: bool = True, backend: IoBackend | None = None, writable: bool = True) -> Self:
        """An existing file at its last committed step. Raises StateError, naming what is wrong; changes nothing."""
        if not path.is_file():
            refuse_link(path, "a state file", StateError)
            what = "one that is no regular file" if path.exists() else "a missing one"
            raise StateError(f"{path} must be a state file, not {what}; check the path or create it")
        file = DirectFile.open(path, direct=direct, backend=backend, writable=writable)
        try:
            return cls._at_last_step(file)
        except BaseException:
            file.close()
            raise

    @classmethod
    def _at_last_step(cls, file: DirectFile) -> Self:
        if file.size_bytes < 3 * BLOCK_BYTES or file.size_bytes % BLOCK_BYTES:
            raise StateError(
                f"{file.path} must be a whole number of {BLOCK_BYTES}-byte blocks, at least 3, not {file.size_bytes} "
                "bytes; it was cut short or is no state file: restore it from a copy"
            )
        blocks = [_read(file, offset, BLOCK_BYTES) for offset in (0, BLOCK_BYTES)]
        last, other, certain = last_and_previous(file.path, blocks)
        block = _read_checked(file, "manifest", StateLayout.manifest_offset, last.manifest_bytes, last.manifest_crc32c)
        body = unseal("manifest", block)
        what = f"the manifest block of {file.path}"
        about, ratio, index = check_fields(what, body, manifest=dict, stripe_ratio=list, file=int)
        manifest, stripe = Manifest.from_json(about), Stripe(tuple(ratio))
        if index >= len(stripe.ratio) or manifest.params > file.size_bytes * sum(stripe.ratio):
            raise StateError(f"{what} must fit its {file.size_bytes} bytes, file {index} of {len(stripe.ratio)}")
        state = cls(file, manifest, stripe, index, block)
        if file.size_bytes != state.layout.size_bytes:
            raise StateError(
                f"{file.path} must have {state.layout.size_bytes} bytes, not {file.size_bytes}; restore it from a copy"
            )
        state._version, state._other = state._load(last), other
        if not certain and (damage := state.verify()):
            raise StateError(f"one superblock is damaged and the step of the other was written over: {damage[0]}")
        if not certain and state._newer_was_there():
            step = last.stamp.step
            warnings.warn(
                f"{file.path} is at step {step}; the superblock of step {step + 1} is damaged: power was lost "
                "in that commit, or the drive has lost it",
                LostStepWarning,
                stacklevel=2,
            )
        return state

    def _newer_was_there(self) -> bool:
        """Whether the table of a later step is there."""
        offset = self.layout.table_offset(self.version.stamp.step + 1)
        try:
            return bool(
                unseal("table", _read(self._file, offset, self.layout.table_bytes))["step"] > self.version.stamp.step
            )
        except (StateError, KeyError, TypeError):
            return False

    def close(self) -> None:
        """Release file and lock. It may be called twice."""
        self._file.close()

    @property
    def path(self) -> Path:
        """The file's path."""
        return self._file.path

    @property
    def direct(self) -> bool:
        """Whether it is read and written past the page cache."""
        return self._file.direct

    @property
    def backend(self) -> IoBackend:
        """The back end that moves its bytes."""
        return self._file.backend

    @property
    def version(self) -> Version:
        """The step that reads see."""
        assert self._version is not None, "a new file has a version from its first commit on"
        return self._version

    # Extents

    def read(self, array: str, extent: Extent, memory: NDArray[np.uint8], version: Version | None = None) -> None:
        """Fill `memory` (aligned, the extent's bytes) from the step, or from another version. Raises StateError.

        A split master is read in its halves, and joined.
        """
        self._check_length(array, extent, memory)
        if (parts := self.manifest.parts(array)) != (array,):
            halves = {part: reuse_buffer(self.manifest.array(part).extent_bytes(extent)) for part in parts}
            for part, half in halves.items():
                self.read(part, extent, half, version)
            words = {part: half.view(np.uint16)[: extent.params] for part, half in halves.items()}
            join_master(words, memory.view(np.float32))
            return
        version = version or self.version
        placed = version.extents[array, extent.index]
        offset = self.layout.array_offset(placed.slot, array, extent)
        self._file.read(offset, memory)
        if not self._apply_log(extent, placed, memory) or crc32c(memory) != placed.crc32c:
            raise StateError(
                f"{self.path}: array {array} of step {version.stamp.step} is damaged in tensors "
                f"{self.manifest.names_in(extent)} (parameters [{extent.start}, {extent.stop})), file offset {offset}; "
                "restore the file from a copy"
            )

    def _apply_log(self, extent: Extent, placed: Placed, memory: NDArray[np.uint8]) -> bool:
        """Bring what a slot has up to date; False where the log is damaged."""
        if placed.logged_bytes:
            changes = reuse_buffer(placed.logged_bytes)
            self._file.read(self.layout.log_offset(extent), changes)
            try:
                apply_changes(changes, memory)
            except StreamError:
                return False
        return True

    def holds(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> bool:
        """Whether `memory` is what the step has of a stored array, by its checksum; reads nothing."""
        self._check_length(array, extent, memory)
        return crc32c(memory) == self.version.extents[array, extent.index].crc32c

    def begin_uncompared(self, extent: Extent) -> bool:
        """Whether the next step need not look for what changes of the weights, as most of them changed just now."""
        left = self._whole_steps.get(extent.index, 0)
        self._whole_steps[extent.index] = max(left - 1, 0)
        return left > 0

    def write(
        self, step: int, array: str, extent: Extent, memory: NDArray[np.uint8], before: NDArray[np.uint8] | None = None
    ) -> int:
        """Write `memory` for `step` into the slot that reads do not see; returns the bytes. Raises StateError.

        before: what the step before has there, where `array` is the weights of a split master: what changes is enough.
        """
        self._check_length(array, extent, memory)
        if self.manifest.parts(array) != (array,):
            size_bytes = 0
            for part, words in split_master(memory.view(np.float32)).items():
                half = reuse_buffer(self.manifest.array(part).extent_bytes(extent))
                half[words.nbytes :] = 0
                half[: words.nbytes] = words.view(np.uint8)
                size_bytes += self.write(step, part, extent, half)
            return size_bytes
        last = None if self._version is None else self._version.extents[array, extent.index]
        if last is not None and before is not None and crc32c(before) == last.crc32c:
            changes = find_changes(before, memory)
            if changes is None:
                self._whole_steps[extent.index] = WHOLE_STEPS
            elif changes.size <= self.layout.log_bytes(extent) - last.logged_bytes:
                self._file.write(self.layout.log_offset(extent) + last.logged_bytes, changes)
                logged_bytes = last.logged_bytes + changes.size
                self._written[array, extent.index] = Placed(last.slot, crc32c(memory), logged_bytes)
                return changes.size
        slot = step % 2 if last is None else 1 - last.slot
        self._file.write(self.layout.array_offset(slot, array, extent), memory)
        self._written[array, extent.index] = Placed(slot, crc32c(memory))
        return memory.size

    def missing(self, extents: Iterable[Extent], arrays: Sequence[str]) -> int:
        """How many of these that lie in this file were not written since the last commit or `discard`."""
        mine = {extent.index for extent in self.layout.extents}
        return sum((array, extent.index) not in self._written
                   for extent in extents if extent.index in mine
                   for name in arrays for array in self.manifest.parts(name))  # fmt: skip

    def discard(self) -> None:
        """Forget what was written since the last commit."""
        self._written = {}

    def verify(self, version: Version | None = None) -> list[str]:
        """Read everything of the step, or of another version; one message for each damaged extent."""
        messages = []
        for extent in self.layout.extents:
            for array in self.manifest.stored:
                try:
                    self.read(array.name, extent, reuse_buffer(array.extent_bytes(extent)), version)
                except StateError as error:
                    messages.append(str(error))
        return messages

    # A commit: prepare, flush, confirm, adopt; every file of the state does one of them before any does the next

    def prepare(self, stamp: Stamp, tensor_steps: Sequence[int], metadata: Mapping[str, Any]) -> None:
        """Write the table of a step: extents that were not written stay as they are.

        After a StateError from here nothing is lost.
        """
        names, indices = [array.name for array in self.manifest.stored], [e.index for e in self.layout.extents]
        extents = (dict(self._version.extents) if self._version else {}) | self._written
        slots = {name: "".join(str(extents[name, index].slot) for index in indices) for name in names}
        checksums = {name: [extents[name, index].crc32c for index in indices] for name in names}
        body = {"step": stamp.step, "tensor_steps": list(tensor_steps), "slots": slots, "checksums": checksums}
        if self.manifest.master is MasterFormat.SPLIT:
            weight = names[0]
            body["logged"] = {weight: [extents[weight, index].logged_bytes for index in indices]}
        table = seal("table", body | {"metadata": metadata})
        self._file.write(self.layout.table_offset(stamp.step), table)
        manifest = self.layout.manifest_bytes, self._manifest_crc32c
        superblock = Superblock(stamp, *manifest, table.nbytes, crc32c(table))
        self._prepared = Version(superblock, tuple(tensor_steps), extents, metadata)

    def flush(self) -> None:
        """Make all writes durable. After a StateError from here nothing is known about them."""
        self._file.flush()

    def confirm(self) -> None:
        """Write the superblock of what was prepared and make it durable. Errors as of `flush`."""
        assert self._prepared is not None
        self._write_superblock(self._prepared.superblock, alone=self._version is None)

    def adopt(self) -> None:
        """Let reads see what was confirmed."""
        self._other = self._version.superblock if self._version else None
        self._version, self._prepared, self._undone = self._prepared, None, False
        self.discard()

    # The step before

    def previous(self) -> Version:
        """The step before, from the other slot; its extents may be written over. Raises StateError without one."""
        if self._other is None:
            raise StateError(f"{self.path} holds no step before {self.version.stamp.step}")
        return self._load(self._other)

    def step_back(self, version: Version) -> None:
        """Let reads see the step before, which `previous` gave; durable after `settle`."""
        self._version, self._other, self._undone = version, None, True
        self.discard()

    def settle(self) -> None:
        """Make the step that reads see the one that this file opens at, durably. Errors as of `flush`.

        What was read when it was opened may have been in a cache, of a process whose flush had failed.
        """
        self._write_superblock(self.version.superblock, alone=self._undone)
        self._undone = False

    # Blocks

    def _write_superblock(self, superblock: Superblock, *, alone: bool) -> None:
        step = superblock.stamp.step
        if alone:
            self._file.write(self.layout.superblock_offset(step + 1), void_block(step))
        self._file.write(self.layout.superblock_offset(step), superblock.block())
        self._file.flush()

    def _load(self, superblock: Superblock) -> Version:
        offset = self.layout.table_offset(superblock.stamp.step)
        table = _read_checked(self._file, "checksum table", offset, superblock.table_bytes, superblock.table_crc32c)
        what = f"the checksum table of {self.path}"
        body = unseal("table", table)
        kinds = {"step": int, "tensor_steps": list, "slots": dict, "checksums": dict, "metadata": dict}
        more = {"logged": dict} if self.manifest.master is MasterFormat.SPLIT else {}
        step, steps, slots, columns, metadata, *given = check_fields(what, body, **kinds, **more)
        check_integers(f"tensor_steps in {what}", steps)
        decode_metadata(metadata)
        counts = [len(check_integers(f"checksums in {what}", column)) for column in columns.values()]
        names = [array.name for array in self.manifest.stored]
        placed = all(type(column) is str and len(column) == len(self.layout.extents) and not column.strip("01")
                     for column in slots.values())  # fmt: skip
        if len(steps) != len(self.manifest.tensors) or sorted(columns) != sorted(names) or (
            counts != [len(self.layout.extents)] * len(names) or sorted(slots) != sorted(names) or not placed
            or step != superblock.step
        ):  # fmt: skip
            raise StateError(f"{what} must be of {len(self.manifest.tensors)} tensors and of arrays {', '.join(names)}")
        logged = {name: [0] * len(self.layout.extents) for name in names}
        logged |= self._check_logged(what, *given) if given else {}
        extents = {(name, extent.index): Placed(int(slot), checksum, size_bytes) for name in names
                   for extent, slot, checksum, size_bytes
                   in zip(self.layout.extents, slots[name], columns[name], logged[name], strict=True)}  # fmt: skip
        return Version(superblock, tuple(steps), extents, metadata)

    def _check_logged(self, what: str, columns: Mapping[str, Any]) -> dict[str, list[int]]:
        """Bytes of the log that count, by extent, of the weights. Raises StateError."""
        weight, extents = self.manifest.stored[0].name, self.layout.extents
        (given,) = check_fields(f"logged in {what}", columns, **{weight: list})
        sizes = check_integers(f"logged in {what}", given)
        if len(sizes) != len(extents) or any(size_bytes % BLOCK_BYTES or size_bytes > self.layout.log_bytes(extent)
                                             for extent, size_bytes in zip(extents, sizes, strict=True)):  # fmt: skip
            raise StateError(f"logged in {what} must be of {len(extents)} extents, in blocks within their room")
        return {weight: sizes}

    def _check_length(self, array: str, extent: Extent, memory: NDArray[np.uint8]) -> None:
        size_bytes = self.manifest.array(array).extent_bytes(extent)
        if memory.nbytes != size_bytes:
            raise AlignmentError(f"memory must have the extent's {size_bytes} bytes, not {memory.nbytes}")


def _layout(manifest: Manifest, stripe: Stripe, index: int, block: NDArray[np.uint8]) -> StateLayout:
    return StateLayout(manifest, block.nbytes, stripe.extents_of(index, manifest.extents))


def _read(file: DirectFile, offset: int, size_bytes: int) -> NDArray[np.uint8]:
    memory = aligned_buffer(size_bytes)
    file.read(offset, memory)
    return memory


def _read_checked(file: DirectFile, name: str, offset: int, size_bytes: int, checksum: int) -> NDArray[np.uint8]:
    if not BLOCK_BYTES <= size_bytes <= file.size_bytes - offset or size_bytes % BLOCK_BYTES:
        raise StateError(f"{file.path}: the {name} must lie inside the file, not {size_bytes} bytes at offset {offset}")
    block = _read(file, offset, size_bytes)
    if crc32c(block) != checksum:
        raise StateError(f"{file.path}: the {name} at offset {offset} is damaged; restore the file from a copy")
    return block
