"""Each place that cannot take a state gives one line that says why; a good one its figures."""

import os
from pathlib import Path

import pytest

from nearflash.abi.optimizers import AdamStep, MasterFormat, SgdStep, StateFormat
from nearflash.cli import main as cli
from nearflash.training import preflight as module
from nearflash.training.preflight import Mount, Severity, StateSizes, preflight

STATE = StateSizes(1_000_000)


def lines(path, state=STATE, **options):
    return {finding.subject: finding for finding in preflight(path, state, **({"measure": False} | options))}


def only_error(path, state=STATE):
    found = list(preflight(path, state))
    assert [finding.level for finding in found if finding.level is Severity.ERROR] == [Severity.ERROR]
    return str(found[-1])


class Status:
    """What statvfs says of a file system, some of it changed."""

    def __init__(self, real, changes):
        self.real, self.changes = real, changes

    def __getattr__(self, name):
        return self.changes.get(name, getattr(self.real, name))


@pytest.fixture
def change_statvfs(monkeypatch):
    def change(**changes):
        real = os.statvfs
        monkeypatch.setattr(os, "statvfs", lambda path: Status(real(path), changes))

    return change


def test_a_good_place_gives_its_figures(tmp_path):
    found = lines(tmp_path, measure=True)
    assert Severity.ERROR not in {finding.level for finding in found.values()}
    assert {"file system", "room", "direct I/O", "write cache", "memlock", "rates", "step", "drive life"} <= set(found)
    assert "GB/s read" in found["rates"].text and "0.012 GB read and as many written in about" in found["step"].text
    assert list(tmp_path.iterdir()) == []


def test_a_file_to_be_made_is_judged_by_its_folder(tmp_path):
    assert lines(tmp_path / "optimizer.state") == lines(tmp_path)


def test_drive_life(tmp_path):
    # 12 bytes a parameter and step: 1,200 TB are 14,285 steps of a model of 7e9 parameters.
    life = lines(tmp_path, StateSizes(1_000_000), rated_tb=1200)["drive life"]
    assert life.level is Severity.OK and life.text.startswith("100,000,000 steps of 0.012 GB within 1200 TB")
    assert lines(tmp_path, rated_tb=1)["drive life"].level is Severity.WARNING


def test_sizes_follow_rule_and_format():
    assert StateSizes(64).step_bytes == 64 * 12
    assert StateSizes(64, AdamStep(1.0, 1, state_format=StateFormat.BF16)).step_bytes == 64 * 8
    assert StateSizes(64, AdamStep(1.0, 1, state_format=StateFormat.MX8)).step_bytes == 64 * 6 + 2 * 2
    assert StateSizes(64, SgdStep(1.0, 1)).step_bytes == 64 * 4
    split = StateSizes(64, AdamStep(1.0, 1, state_format=StateFormat.BF16), MasterFormat.SPLIT)
    assert split.step_bytes == 64 * 8  # of which a step reads 64 · 6
    assert split.file_bytes - StateSizes(64, split.rule).file_bytes == 64 * 4  # the log of weights


def test_missing_folder(tmp_path):
    missing = tmp_path / "no" / "state"
    assert only_error(missing) == (
        f"error    path         {missing} must be in a folder that exists: make {missing.parent}, or give another"
    )


def test_full(tmp_path, change_statvfs):
    change_statvfs(f_bavail=1000, f_frsize=4096)
    assert only_error(tmp_path) == (
        "error    room         the state of 1,000,000 parameters takes 0.0255 GB (two slots), and 0.0041 GB are free: "
        "0.0214 GB short; free them or use more drives"
    )


def test_files_on_one_drive_share_its_room_and_life(tmp_path, change_statvfs, capsys):
    """Each was compared with all of it."""
    change_statvfs(f_bavail=8_000, f_frsize=4096)  # room for one of them
    paths = [str(tmp_path / name) for name in ("a", "b")]
    assert cli.main(["preflight", paths[0], "--params", "1M", "--no-measure", "--tbw", "1"]) == 0
    assert "83,333 steps of 0.012 GB" in capsys.readouterr().out
    assert cli.main(["preflight", *paths, "--params", "2M", "--no-measure"]) == 1
    assert "the state of 2,000,000 parameters takes 0.05 GB" in capsys.readouterr().out


def test_what_lies_on_the_path_already(tmp_path):
    (tmp_path / "state").write_text("")
    assert lines(tmp_path / "state")["path"].level is Severity.WARNING
    os.mkfifo(tmp_path / "pipe")
    assert "must be a file or a block device, not a pipe" in only_error(tmp_path / "pipe")


@pytest.mark.parametrize("value", ["nan", "inf", "-3", "0"])
def test_rated_writes_that_mean_nothing(tmp_path, capsys, value):
    with pytest.raises(SystemExit):
        cli.main(["preflight", str(tmp_path), "--params", "1M", "--tbw", value])
    assert "argument --tbw: must be a number above 0" in capsys.readouterr().err


def test_read_only(tmp_path, change_statvfs):
    change_statvfs(f_flag=os.ST_RDONLY)
    assert "is read-only; mount it for writing (mount -o remount,rw" in only_error(tmp_path)


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "ext4"])
def test_file_systems(tmp_path, monkeypatch, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - xfs /dev/root rw\n"
        f"2 1 9:9 / {tmp_path} rw,relatime shared:1 - {kind} the\\040source rw\n"
        f"3 2 9:8 / {tmp_path}/inner rw - xfs inner rw\n"
    )
    monkeypatch.setattr(module, "_MOUNTS", mounts)
    assert Mount.of(tmp_path).source == "the\\040source" and Mount.of(tmp_path / "inner").device == "9:8"
    assert Mount.of(Path("/elsewhere")).point == Path("/")
    if kind == "tmpfs":
        assert "it is memory, which the state is to save" in only_error(tmp_path)
    else:
        assert lines(tmp_path)["file system"].level is (Severity.WARNING if kind == "nfs4" else Severity.OK)


def test_properties_of_the_drive(tmp_path, monkeypatch):
    """A partition's queue is that of its drive."""
    drive = tmp_path / "block" / "nvme0n1"
    (drive / "nvme0n1p1").mkdir(parents=True)
    (drive / "queue").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / Mount.of(tmp_path).device).symlink_to(drive / "nvme0n1p1")
    monkeypatch.setattr(module, "_SYS_BLOCK", tmp_path / "dev")
    for name, value in {"write_cache": "write through", "rotational": "0", "logical_block_size": "512"}.items():
        (drive / "queue" / name).write_text(value + "\n")
    found = lines(tmp_path)
    assert found["write cache"].text.startswith("write through:") and "drive" not in found
    assert "the drive's are of 512" in found["direct I/O"].text
    (drive / "queue" / "logical_block_size").write_text("16384\n")
    assert "blocks must be at most 4096 bytes, not 16384" in only_error(tmp_path)


def test_without_direct_io(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", os.O_TMPFILE)
    assert lines(tmp_path)["direct I/O"].level is Severity.ERROR


def test_command(tmp_path, capsys):
    arguments = ["preflight", str(tmp_path), str(tmp_path / "no" / "state"), "--params", "2M", "--no-measure"]
    assert cli.main([*arguments, "--optimizer", "sgd-momentum", "--state-format", "bf16", "--tbw", "1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path}:\n  ok       file system")
    assert "166,666 steps of 0.006 GB within 1 TB written" in out  # half of the parameters, 6 bytes each
    assert "  error    path         " in out
    assert cli.main([*arguments, "--optimizer", "sgd", "--tbw", "1"]) == 1
    assert "250,000 steps of 0.004 GB" in capsys.readouterr().out  # as train's, which has no momentum
    with pytest.raises(SystemExit):
        cli.main(["preflight", str(tmp_path), "--params", "many"])
    assert "must be a count such as 135M or 7B, not 'many'" in capsys.readouterr().err
