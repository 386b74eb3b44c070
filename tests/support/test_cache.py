"""The build cache: one build for many callers, nothing left of a failed one, nothing that others can write."""

import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.support import cache
from nearflash.support.cache import build_once, cache_root


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFLASH_CACHE", str(tmp_path / "cache"))


def test_many_callers_build_once():
    # Each call opens the lock file itself, so threads exclude each other just as processes do.
    builds = []

    def build(folder):
        builds.append(folder)
        time.sleep(0.2)
        (folder / "result").write_text("complete")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: build_once("slow", ["a"], build), range(4)))
    assert len(builds) == 1
    assert len(set(folders)) == 1
    assert (folders[0] / "result").read_text() == "complete"


def test_a_failed_build_does_not_count():
    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("tool failed")

    with pytest.raises(RuntimeError, match="tool failed"):
        build_once("thing", ["a"], fail)
    folder = build_once("thing", ["a"], lambda work: (work / "whole").write_text("whole"))
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert build_once("thing", ["b"], lambda work: None) != folder


def test_an_installed_copy_takes_nothing_from_the_working_folder(monkeypatch, tmp_path):
    """It loaded what lay in ./build/cache of any folder that it was called in."""
    monkeypatch.delenv("NEARFLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setattr(cache, "_tree_cache", lambda: None)
    (tmp_path / "work" / "build" / "cache").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert cache_root() == tmp_path / "own" / "nearflash"
    assert stat.S_IMODE(cache_root().stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "nearflash"


def test_the_source_tree_keeps_its_own(monkeypatch):
    monkeypatch.delenv("NEARFLASH_CACHE")
    assert cache._tree_cache() == Path(__file__).parents[2] / "build" / "cache"


def test_nothing_is_loaded_that_others_can_write():
    folder = build_once("thing", ["a"], lambda work: (work / "library.so").write_text("code"))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"nobody else may write there: run `chmod go-w .*thing"):
        build_once("thing", ["a"], lambda work: None)
    folder.chmod(0o755)
    assert build_once("thing", ["a"], lambda work: None) == folder
    cache_root().chmod(0o777)
    with pytest.raises(ConfigError, match=r"only you can write to.*NEARFLASH_CACHE names another"):
        build_once("thing", ["a"], lambda work: None)


def test_a_cache_that_is_a_file_or_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("n" * 256)):
        monkeypatch.setenv("NEARFLASH_CACHE", str(path))
        with pytest.raises(ConfigError, match="must be a folder that only you can write to"):
            cache_root()


def test_a_lock_follows_no_link(tmp_path):
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError), cache.hold_lock(tmp_path / "lock"):
        raise AssertionError("unreachable")
    assert (tmp_path / "victim").read_text() == "kept"
