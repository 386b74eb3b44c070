"""The two 4096-byte blocks at the head of a state file: one for a step of each parity.

A block holds the superblock of a committed step, or a `void` block: the step of the other block, and that this slot
holds nothing: so a step that was undone cannot come back, and one that stands alone needs no proof.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearflash.abi import ABI_VERSION
from nearflash.abi.errors import StateError
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.sealed import is_sealed, seal, unseal
from nearflash.support.tables import TableReader, at_least_zero, check_fields

__all__ = ["STATE_VERSION", "Stamp", "Superblock", "last_and_previous", "void_block"]

STATE_VERSION = 4
"""Raised whenever the file's layout changes meaning; files of another version are rejected."""


@dataclass(frozen=True)
class Stamp:
    """The values that the superblocks of one committed step have in common in all files of the state."""

    identity: str
    """16 hexadecimal digits drawn at creation: tells this state and its copies from all others."""
    profile: str
    step: int
    commit: str
    """16 hexadecimal digits drawn at the commit: tells step 7 from the step 7 of another history."""


@dataclass(frozen=True)
class Superblock:
    """One file's statement of one committed step. Checksums are CRC32C."""

    stamp: Stamp
    manifest_bytes: int
    manifest_crc32c: int
    table_bytes: int
    table_crc32c: int

    @property
    def step(self) -> int:
        """The committed step."""
        return self.stamp.step

    def block(self) -> NDArray[np.uint8]:
        """The block, 4096 bytes."""
        return seal("superblock", {"version": STATE_VERSION, "abi": ABI_VERSION, **asdict(self)}, BLOCK_BYTES)

    @classmethod
    def parse(cls, path: Path, body: dict[str, Any]) -> Self:
        """From the body of a block. Raises StateError for a file of another version."""
        for name, ours in (("version", STATE_VERSION), ("abi", ABI_VERSION)):
            if body.get(name) != ours:
                raise StateError(
                    f"{path} must have {name} {ours}, not {body.get(name)!r}; use the nearflash release that wrote it"
                )
        table = {name: value for name, value in body.items() if name not in ("version", "abi")}
        return TableReader(StateError, at_least_zero).parse(cls, table, f"the superblock of {path}")


def void_block(step: int) -> NDArray[np.uint8]:
    """The block of a slot that holds nothing while `step`, in the other slot, is valid."""
    return seal("void", {"valid": step}, BLOCK_BYTES)


def last_and_previous(path: Path, blocks: Sequence[NDArray[np.uint8]]) -> tuple[Superblock, Superblock | None, bool]:
    """From both blocks of a file: the last step, the step before it, and whether the last one is valid for certain.

    Where it is not certain, a newer superblock may have been lost after this slot was written over.
    Raises StateError for a file that is misdirected, of another version, or without a superblock that holds.
    """
    if not any(map(is_sealed, blocks)):
        raise StateError(f"{path} must begin with a nearflash superblock; it is another kind of file")
    superblocks: list[Superblock] = []
    valid = None
    for slot, block in enumerate(blocks):
        if body := _body("superblock", block):
            superblock = Superblock.parse(path, body)
            superblocks += [superblock] if superblock.step % 2 == slot else []
        elif body := _body("void", block):
            (valid,) = check_fields(f"the void block of {path}", body, valid=int)
    if not superblocks:
        raise StateError(f"{path}: both superblocks are damaged; restore the file from a copy")
    last = max(superblocks, key=lambda superblock: superblock.step)
    previous = next((superblock for superblock in superblocks if superblock.step == last.step - 1), None)
    return last, previous, previous is not None or valid == last.step


def _body(kind: str, block: NDArray[np.uint8]) -> dict[str, Any] | None:
    try:
        return unseal(kind, block)
    except StateError:
        return None
