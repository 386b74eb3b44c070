"""A state file's name may become another's while the file is open: what stands there then is not the optimizer's."""

import pytest
import torch

from nearflash.abi.errors import CommandError, StateError
from nearflash.storage import StateStore
from nearflash.storage.state import snapshot as copies


@pytest.fixture
def make():
    return lambda seed: torch.nn.Parameter(torch.randn(40, generator=torch.Generator().manual_seed(seed)))


def run(optimizer, tensor, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        (tensor**2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_the_file_of_another_run_stays(open_optimizer, make, tmp_path, steps, how):
    """A group that was added put the state in the place of what stood there; before the first step, it was unlinked."""
    mine, theirs = make(0), make(1)
    optimizer = open_optimizer([mine], path=tmp_path / "state")
    run(optimizer, mine, steps)
    if how == "removed":
        (tmp_path / "state").unlink()
    else:
        other = open_optimizer([theirs], path=tmp_path / "other")
        run(other, theirs)
        other.close()
        (tmp_path / "other").replace(tmp_path / "state")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StateError, match="moved, removed or replaced"):
        optimizer.add_param_group({"params": [make(2)]})
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    run(optimizer, mine)
    (kept,) = optimizer.store.snapshot(tmp_path / "kept")
    with StateStore.open(kept) as store:
        assert store.steps == steps + 1 and store.identity == optimizer.store.identity


def test_a_snapshot_is_of_the_open_file(open_optimizer, make, tmp_path, monkeypatch):
    """Where blocks can be shared it was of what had the name."""
    optimizer = open_optimizer([make(0)], path=tmp_path / "state")
    monkeypatch.setattr(copies, "reflink", lambda source, path: path.write_bytes(source.read_bytes()) > 0)
    (tmp_path / "state").unlink()
    (tmp_path / "state").write_bytes(b"a thesis")
    (kept,) = optimizer.store.snapshot(tmp_path / "kept")
    with StateStore.open(kept) as store:
        assert store.identity == optimizer.store.identity


def test_a_snapshot_replaces_none_of_another_run(open_optimizer, make, tmp_path):
    mine, theirs = make(0), make(1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    optimizer = open_optimizer([mine], path=tmp_path / "a")
    other = open_optimizer([theirs], path=tmp_path / "b")
    run(other, theirs)
    other.close()
    before = (tmp_path / "b" / "optimizer.state").read_bytes()
    with pytest.raises(StateError, match="must be an earlier snapshot of this state"):
        optimizer.store.snapshot(tmp_path / "b")
    assert (tmp_path / "b" / "optimizer.state").read_bytes() == before


@pytest.mark.parametrize("path", [None, 3, b"state", "a\0b", [None]])
def test_what_is_no_path(open_optimizer, make, path):
    with pytest.raises(CommandError, match="path must be"):
        open_optimizer([make(0)], path=path)


@pytest.mark.parametrize("snapshot", [None, [], [3]])
def test_what_is_no_snapshot(open_optimizer, make, snapshot):
    with pytest.raises(StateError, match="snapshot must be a folder"):
        open_optimizer([make(0)]).restore(snapshot)


def test_what_is_closed_is_not_called_damaged(open_optimizer, make, tmp_path):
    optimizer = open_optimizer([make(0)])
    optimizer.close()
    with pytest.raises(StateError, match="must be open in this process"):
        optimizer.store.read_array("p")
