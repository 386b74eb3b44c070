"""Small files: replaced durably, complete or not at all."""

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nearflash.support import files
from nearflash.support.files import (
    check_replaceable,
    give_name,
    open_regular,
    read_bytes,
    read_text,
    replace_file,
    write_durably,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_write_replaces_the_whole_file_and_is_the_users_alone(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("an older, longer text")
    path.chmod(0o644)
    write_durably(path, "new")
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert names(tmp_path) == ["a.json"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyError), replace_file(path) as out:
        out.write(b"half")
        raise KeyError
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_a_link_is_replaced_and_its_target_stays(tmp_path):
    target, path = tmp_path / "target", tmp_path / "link"
    target.write_text("another's")
    path.symlink_to(target)
    write_durably(path, "own")
    assert target.read_text() == "another's"
    assert not path.is_symlink() and path.read_text() == "own"


@pytest.mark.parametrize("has", ["renames to free names", "links", "neither"])
def test_keep_existing_never_takes_a_name_that_another_took_meanwhile(tmp_path, monkeypatch, has):
    if has != "renames to free names":
        monkeypatch.setattr(files, "_rename_to_free_name", lambda partial, path: False)
    if has == "neither":

        def no_links(*_args, **_kwargs):
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a"
    with pytest.raises(FileExistsError), replace_file(path, keep_existing=True) as out:
        out.write(b"own")
        path.write_text("another's")
    assert path.read_text() == "another's"
    assert names(tmp_path) == ["a"]
    with pytest.raises(FileExistsError):
        write_durably(path, "own", keep_existing=True)
    path.unlink()
    write_durably(path, "own", keep_existing=True)
    assert path.read_text() == "own"
    assert names(tmp_path) == ["a"]


def test_keep_existing_keeps_a_dangling_link(tmp_path):
    path = tmp_path / "a"
    path.symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        write_durably(path, "own", keep_existing=True)
    assert path.is_symlink()


def test_the_file_is_flushed_before_it_has_its_name_and_the_folder_after(tmp_path, monkeypatch):
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor):
        events.append("flush folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "flush file")
        fsync(descriptor)

    def noted_replace(self, target):
        events.append("rename")
        return replace(self, target)

    monkeypatch.setattr(files.os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_durably(tmp_path / "a", b"content")
    assert events == ["flush file", "rename", "flush folder"]


@pytest.mark.parametrize(("flags", "reason"), [(0, "Permission denied"), (os.ST_RDONLY, "Read-only file system")])
def test_a_folder_that_cannot_be_written_is_named_before(tmp_path, monkeypatch, flags, reason):
    """Commands computed for hours, and then could not write."""
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    monkeypatch.setattr(files.os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    with pytest.raises(OSError, match=f"{reason}: '{tmp_path}'"):
        check_replaceable(tmp_path / "a")


def test_the_longest_name_that_the_file_system_takes(tmp_path):
    write_durably(tmp_path / ("n" * 255), "content")
    assert names(tmp_path) == ["n" * 255]


def test_give_name_keeps_both_files_where_the_name_is_taken(tmp_path):
    partial, path = tmp_path / "partial", tmp_path / "a"
    partial.write_text("own")
    path.write_text("another's")
    with pytest.raises(FileExistsError):
        give_name(partial, path, keep_existing=True)
    assert (partial.read_text(), path.read_text()) == ("own", "another's")


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="no regular file"):
            open_regular(path)
    for path in (tmp_path / "missing", tmp_path / ("n" * 256), Path("a\0b")):
        with pytest.raises(OSError):
            read_text(path)


def test_a_bound_past_the_address_space_is_no_bound(tmp_path):
    """A transcript's, of 4 GiB, was an OverflowError on a board's 32-bit processor."""
    (tmp_path / "file").write_bytes(b"abc")
    assert read_bytes(tmp_path / "file", sys.maxsize) == b"abc" == read_bytes(tmp_path / "file", 1 << 100)


def test_a_text_is_bounded(tmp_path):
    path = tmp_path / "a"
    path.write_text("12345")
    assert read_text(path, 5) == "12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_text(path, 4)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError):
        read_text(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Once it was the beginning of a file's first prompt, whose tokens it changed."""
    (tmp_path / "a").write_text("\ufeffOnce\ufeff", encoding="utf-8")
    assert read_text(tmp_path / "a") == "Once\ufeff"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to a device"])
def test_what_is_no_regular_file_is_never_replaced(tmp_path, kind):
    path = {"folder": tmp_path / "a", "pipe": tmp_path / "a", "device": Path("/dev/null")}.get(kind, tmp_path / "a")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/null")
    before = os.lstat(path)
    with pytest.raises(OSError) as found:
        write_durably(path, "content")
    assert found.value.filename == str(path)
    assert os.lstat(path) == before
    assert names(tmp_path) in ([], ["a"])


def test_errors_name_the_file_and_not_its_temporary_name(tmp_path):
    for path in (tmp_path / "no folder" / "a", tmp_path / ("n" * 256), tmp_path / "a\0b", Path()):
        with pytest.raises(OSError) as found:
            write_durably(path, "content")
        assert found.value.filename == str(path)
    with pytest.raises(OSError) as found, replace_file(tmp_path / "a"):
        raise OSError(28, "No space left on device")
    assert found.value.filename == str(tmp_path / "a")


def test_a_file_of_a_terabyte_is_refused_unread(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as out:
        out.truncate(10**12)
    with pytest.raises(OSError, match="more than"):
        read_text(path)
