"""`nearflash state` and its actions."""

import argparse
from dataclasses import replace

import pytest

from nearflash.abi.errors import StateError
from nearflash.storage import StateStore
from nearflash.storage.state.command import state
from nearflash.storage.state.status import StateStatus


@pytest.fixture
def run(capsys):
    parser = argparse.ArgumentParser()
    state(parser.add_subparsers())

    def call(*argv):
        arguments = parser.parse_args(["state", *map(str, argv)])
        code = arguments.run(arguments)
        return code, capsys.readouterr().out.splitlines()

    return call


def test_status(run, pair):
    code, lines = run("status", *pair)
    assert code == 0
    assert lines[0].startswith("step 3 of state ") and lines[0].endswith(", profile ieee")
    assert lines[1:5] == [
        "tensors 3, parameters 2130, updates of a tensor 2 to 3",
        "array p: 4 bytes",
        "array m: 4 bytes, exp_avg",
        "array v: 4 bytes, exp_avg_sq",
    ]
    assert lines[5:] == [
        f"file 0: {pair[0]}, {pair[0].stat().st_size} bytes, 2 of 3 extents",
        f"file 1: {pair[1]}, {pair[1].stat().st_size} bytes, 1 of 3 extents",
        'metadata {"cursor": 3}',
    ]


def test_status_shortens_what_would_fill_the_screen(pair):
    """Once the states of the random generators of a training run filled several."""
    with StateStore.open(pair) as store:
        status = StateStatus.of(store)
    *_, last = replace(status, metadata={"cursor": 3, "generators": {"torch": "A" * 5000}}).lines()
    assert last == 'metadata {"cursor": 3, "generators": "(5013 characters)"}'


def test_verify(run, pair):
    assert run("verify", "--buffered", *pair) == (0, ["step 3: 9 of 9 extents of arrays are valid"])
    data = bytearray(pair[1].read_bytes())
    data[-77] ^= 1
    pair[1].write_bytes(data)
    code, (damage, last) = run("verify", *pair)
    assert code == 1 and last == "step 3: 8 of 9 extents of arrays are valid"
    assert damage.startswith(f"DAMAGED {pair[1]}: array v of step 3 is damaged in tensors 'embed' to 'head' ")
    assert f"file offset {len(data) - 4096}" in damage


def test_files_that_cannot_be_written_are_read(run, pair, tmp_path, mount_read_only):
    """Once a copy on a medium that is mounted to be read could be neither verified nor exported."""
    mount_read_only(*pair)
    with pytest.raises(StateError, match="Read-only file system"):
        StateStore.open(pair)
    assert run("status", *pair)[0] == run("verify", *pair)[0] == 0
    assert run("export", *pair, "--to", tmp_path / "x")[0] == 0
    assert run("reshard", *pair, "--to", tmp_path / "r")[0] == 0


def test_snapshot_export_import_reshard(run, pair, tmp_path, small):
    assert run("snapshot", *pair, "--to", tmp_path / "s") == (0, [str(tmp_path / "s" / path.name) for path in pair])
    code, (line,) = run("export", *pair, "--to", tmp_path / "x")
    assert code == 0 and line == f"{tmp_path / 'x'}: step 3, 3 tensors, {(tmp_path / 'x').stat().st_size} bytes"
    code, lines = run("import", tmp_path / "x", "--to", tmp_path / "i")
    assert code == 0 and lines[0].startswith("step 3 of state ")
    code, lines = run("reshard", *pair, "--to", *[tmp_path / f"r{i}" for i in range(3)], "--stripe-ratio", "1,1,1")
    assert code == 0 and lines[5:8] == [
        f"file {i}: {tmp_path / f'r{i}'}, {(tmp_path / f'r{i}').stat().st_size} bytes, 1 of 3 extents" for i in range(3)
    ]
    with StateStore.open([tmp_path / f"r{i}" for i in range(3)]) as store:
        small.assert_exact(store)
    with pytest.raises(StateError, match="must not exist yet"):
        run("reshard", *pair, "--to", *pair)
