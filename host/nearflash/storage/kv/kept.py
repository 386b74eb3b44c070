"""A store whose sequences outlast it: made where its file is not there yet, else opened as it was left."""

import uuid
from pathlib import Path
from typing import Any

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.errors import CommandError, StateError
from nearflash.storage.flash.file import KEPT, FileFlash, is_unwritten
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.io.backend import IoBackend
from nearflash.storage.kv.journal import SequenceJournal, journal_path
from nearflash.storage.kv.layout import KvLayout, KvShape, read_label
from nearflash.storage.kv.recovery import FoundPages
from nearflash.storage.kv.store import KvStore

__all__ = ["open_kept_store", "read_kept_layout", "read_kept_sequences"]


def read_kept_layout(path: Path, **options: Any) -> KvLayout | None:
    """The page layout of a kept store; None where there is none yet. `options` are FileFlash.open's.

    Raises StateError for a file that holds something else, or is in use.
    """
    flash = _open(path, **options)
    if flash is None:
        return None
    with flash:
        return read_label(flash.about)[1] if flash.about else None


def open_kept_store(
    path: Path, shape: KvShape, layout: KvLayout, geometry: FlashGeometry, *, direct: bool = True,
    backend: IoBackend | None = None, **options: Any,
) -> KvStore:  # fmt: skip
    """The store in the file `path`, its journal beside it (`journal_path`); `options` are KvStore's.

    A new one has room as `geometry` says. Raises StateError for a file of another shape or layout, one whose sequences
    were not kept, or whose journal is damaged; CommandError for a block device.
    """
    if path.is_block_device():
        raise CommandError(f"sequences must be kept in a file, beside which their journal lies, not on {path}")
    flash = _open(path, direct=direct, backend=backend)
    try:
        if flash is None or not flash.about:  # nothing, or what somebody who died had begun
            SequenceJournal.check_replaceable(journal_path(path))
            if flash is not None:
                flash.close()
            flash = FileFlash.create(path, geometry, direct=direct, backend=backend)
            journal = SequenceJournal.create(journal_path(path), uuid.uuid4().hex)
        else:
            _check(path, flash, shape, layout)
            journal = SequenceJournal.open(journal_path(path), flash.about[KEPT])
        try:
            return KvStore(flash, shape, layout, journal=journal, **options)
        except BaseException:
            journal.close(None)
            raise
    except BaseException:
        if flash is not None:
            flash.close()
        raise


def read_kept_sequences(flash: FileFlash, *, verify: bool = False) -> dict[int, int]:
    """Tokens of each sequence of a kept store, as it would have them again; nothing is changed.

    verify: pages that are not valid do not count. Raises StateError for a damaged journal.
    """
    shape, layout = read_label(flash.about)
    entries, _ = SequenceJournal.read(journal_path(flash.path), flash.about[KEPT])
    pages, size, lengths = FoundPages(flash, shape, layout, verify=verify), layout.group_tokens, {}
    for number, entry in entries.items():
        groups = min(table.shape[1] for table in pages.tables(PageKind.TOKEN, entry.token_tags))
        tokens, partial = entry.partial or (0, 0)
        has_partial = tokens // size == groups and pages.group(partial, groups) is not None
        lengths[number] = tokens if has_partial else groups * size
    return lengths


def _open(path: Path, *, direct: bool = True, backend: IoBackend | None = None) -> FileFlash | None:
    """None where nothing was ever written. Raises StateError for a file that holds something else, or is in use."""
    try:
        return FileFlash.open(path, direct=direct, backend=backend)
    except StateError:
        if is_unwritten(path, direct=direct, backend=backend):
            return None
        raise


def _check(path: Path, flash: FileFlash, shape: KvShape, layout: KvLayout) -> None:
    label = read_label(flash.about)
    for name, stored, wanted in zip(("K and V", "pages"), label, (shape, layout), strict=True):
        if stored != wanted:
            raise StateError(
                f"{path} must hold {name} as {wanted}, not as {stored}: they are another model's or policy's"
            )
    if type(flash.about.get(KEPT)) is not str:
        raise StateError(f"{path} must be of a store that keeps its sequences; nothing says which are in this one")
