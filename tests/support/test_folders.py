"""Folders of compiled things: nobody else can put one there."""

import grp
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from nearflash.support import folders
from nearflash.support.folders import check_private, private_folder, user_folder


def give_away(path: Path, monkeypatch) -> None:
    """Make a path another user's; who may not do that becomes another user, whose code is another's."""
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        monkeypatch.setattr(folders, "__file__", "/")
    else:
        os.chown(path, 12345, 12345, follow_symlinks=False)


def test_a_folder_is_made_for_its_user_alone(tmp_path):
    before = os.umask(0)
    try:
        made = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b"
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made.parent, made)] == [0o755, 0o700]
    assert private_folder(made) == made


def test_who_else_can_write_is_named(tmp_path):
    folder = tmp_path / "outer" / "inner"
    folder.mkdir(parents=True)
    for each, mode in ((folder, 0o777), (folder, 0o1777), (folder.parent, 0o777), (folder.parent, 0o702)):
        each.chmod(mode)
        with pytest.raises(OSError, match=f"chmod go-w {each}`"):
            check_private(folder)
        each.chmod(0o755)
    check_private(folder)
    folder.parent.chmod(0o1777)  # as /tmp: nobody renames what is another's there
    check_private(folder)


def test_a_group_counts_as_its_user_where_it_is_that_users_own(tmp_path, monkeypatch):
    folder = tmp_path / "a"
    folder.mkdir()
    folder.chmod(0o775)
    name = folder.owner()
    for group, members, fits in ((name, [], True), (name, [name], True), (name, ["else"], False), ("staff", [], False)):
        monkeypatch.setattr(grp, "getgrgid", lambda _, g=group, m=members: SimpleNamespace(gr_name=g, gr_mem=m))
        if fits:
            check_private(folder)
        else:
            with pytest.raises(OSError, match="nobody else may write there"):
                check_private(folder)


@pytest.mark.parametrize("what", ["folder", "parent", "link"])
def test_what_is_another_users_is_named(tmp_path, monkeypatch, what):
    folder, link = tmp_path / "outer" / "inner", tmp_path / "link"
    folder.mkdir(parents=True)
    link.symlink_to(folder)
    check_private(link)
    give_away({"folder": folder, "parent": folder.parent, "link": link}[what], monkeypatch)
    with pytest.raises(OSError, match="must belong to you or root"):
        check_private(link)


def test_names_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("n" * 300), tmp_path / "a\0b"):
        with pytest.raises(OSError):
            private_folder(path)


def test_the_users_folders(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert user_folder("XDG_STATE_HOME") == tmp_path / "nearflash"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert user_folder("XDG_STATE_HOME") == tmp_path / "home" / ".local" / "state" / "nearflash"

    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(OSError, match="set HOME, or XDG_STATE_HOME"):
        user_folder("XDG_STATE_HOME")
