"""`nearflash bitstream`: list, build, verify, deploy; what it loads from other packages is replaced here."""

import json
import os
import stat
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from nearflash.abi.errors import BitstreamError
from nearflash.abi.kernel.config import config
from nearflash.cli import bitstream as subject
from nearflash.cli import main as cli
from nearflash.device.bitstreams import load_board
from nearflash.device.bitstreams.manifest import sha256
from nearflash.verify.fixtures.built import make_files

BOARD = """format = "nearflash board"
version = 1
name = "desk"
title = "Someone's board"
part = "xc7z020clg400-1"
family = "xc7"
flow = "open"
backend = "pynq"
clock_hz = 50_000_000
kernels = ["update-tiny", "attend-tiny"]
sources = ["a data sheet"]
memory = { base_address = 0, size_bytes = 4096, bandwidth_bytes_per_s = 1_000 }
resources = { lut = 100, ff = 200, dsp = 4, bram36 = 4.5 }
limits.update = { lut = 50, ff = 60, dsp = 2, bram36 = 1, logic_depth = 9 }
"""


def run(capsys, *argv):
    code = cli.main(["bitstream", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """The folder of the board `desk`, the only one, with its kernel `update` built."""
    folder = tmp_path / "bitstreams" / "desk"
    folder.mkdir(parents=True)
    (folder / "board.toml").write_text(BOARD)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(folder.parent))
    files = make_files(load_board("desk"), "update", "1" * 64)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    manifest = {
        "board": "desk", "config": "update-tiny", "digest": config("update-tiny").digest, "design": "1" * 64,
        "git": "2" * 40, "tools": {}, "files": {name: sha256(folder / name) for name in files},
        "utilisation": {"lut": 40, "ff": 50, "dsp": 1, "bram36": 0.5}, "clock_hz": 40_000_000, "fmax_hz": 45_000_000,
        "critical_path": [], "evidence": "routed",
    }  # fmt: skip
    (folder / "update.json").write_text(json.dumps(manifest))
    return folder


def change(folder, **entries):
    path = folder / "update.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_list_shows_evidence_cells_and_files(capsys, desk):
    code, out, _ = run(capsys, "list")
    assert code == 0 and out.splitlines() == [
        "desk: Someone's board, xc7z020clg400-1, open flow",
        "  update  routed, Fmax 45.0 MHz, runs at 40.0 MHz, 40 LUT (40%), 50 FF (25%), 1 DSP (25%), 0.5 BRAM36 (11%); "
        "update.bit, update.hwh",
        "  attend  not built",
    ]
    change(desk, fmax_hz=0, evidence="synthesised", files={})
    assert "synthesised, no Fmax, 40 LUT (40%)" in run(capsys, "list", "desk")[1]
    code, _, err = run(capsys, "list", "table")
    assert code == 2 and err == "nearflash: board must be one of desk, not 'table'\n"


def test_list_with_costs_has_a_row_for_each_build(capsys, desk):
    code, out, _ = run(capsys, "list", "--cost", "--json")
    (row,) = map(json.loads, out.splitlines())
    assert code == 0 and (row["board"], row["kernel"], row["lut"], row["evidence"]) == ("desk", "update", 40, "routed")
    assert row["bytes_per_second"] == 1000 and row["units_per_second"] == 1000 / 30 and row["unit"] == "params"
    assert row["part_usd"] > 0 and row["price_date"] and row["rate_evidence"] == "model"
    head, line = run(capsys, "list", "desk", "--cost")[1].splitlines()
    assert head.split()[:6] == ["board", "kernel", "LUT", "DSP", "BRAM36", "MHz"]
    assert line.split()[:6] == ["desk", "update", "40", "1", "0.5", "40.0"] and "routed, price of 20" in line


def test_list_of_this_checkout_has_every_board(capsys, monkeypatch):
    monkeypatch.delenv("NEARFLASH_BITSTREAMS", raising=False)
    code, out, _ = run(capsys, "list")
    boards = [line.partition(":")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert code == 0 and {"ku3p", "pynq-z2", "smartssd", "zu17eg", "zynq7045"} <= set(boards)


def test_verify_compares_files_digests_and_limits(capsys, desk):
    code, out, _ = run(capsys, "verify")
    assert (code, out) == (0, "desk/update: routed, 2 files as built\ndesk/attend: not built\n")
    code, out, _ = run(capsys, "verify", "desk")
    assert code == 1 and "desk/attend:" in out and "attend.json must exist" in out
    (desk / "update.bit").write_bytes(b"bit!")
    code, out, _ = run(capsys, "verify")
    assert code == 1 and "update.bit must have the SHA-256 of its manifest" in out
    change(desk, digest="3" * 64)
    code, out, _ = run(capsys, "verify")
    assert code == 1 and "must be a build of update-tiny with digest" in out


def test_verify_finds_a_kernel_past_its_limits(capsys, desk):
    change(desk, logic_depth=9.25)
    code, out, _ = run(capsys, "verify")
    assert code == 1 and "desk/update: logic_depth must be at most 9, not 9.25" in out
    change(desk, logic_depth=9, utilisation={"lut": 51, "ff": 50, "dsp": 1, "bram36": 0.5})
    assert "desk/update: lut must be at most 50, not 51" in run(capsys, "verify")[1]


@pytest.fixture
def functions(monkeypatch):
    """What stands for the functions of other packages, by name, with their calls."""
    calls = []

    def build(board, kernel, *, package_only):
        calls.append((board.name, kernel, package_only))
        yield "one line"
        if kernel == "attend":
            raise BitstreamError("desk must be built by vivado")

    def estimate(board, kernel):
        calls.append((board.name, kernel))
        return SimpleNamespace(config=kernel, utilisation=SimpleNamespace(lut=12), logic_depth=8.25)

    def lint(configs):
        calls.append(configs)
        yield SimpleNamespace(name="good", waived=Counter({"B": 2, "A": 1}), complaints=())
        if configs:
            yield SimpleNamespace(name="bad", waived=Counter(), complaints=("bad.v:1: LATCH: a latch",))

    found = {"build": build, "estimate": estimate, "lint": lint}
    monkeypatch.setattr(subject, "load_function", found.__getitem__)
    return calls


def test_build_prints_what_is_made_and_ends_with_2_where_tools_are_missing(capsys, desk, functions):
    assert run(capsys, "build", "desk", "--kernel", "update") == (0, "one line\n", "")
    assert run(capsys, "build", "desk", "--kernel", "attend") == (
        2, "one line\n", "nearflash: desk must be built by vivado\n")  # fmt: skip
    assert functions == [("desk", "update", False), ("desk", "attend", False)]


def test_a_vendors_package_is_written_without_its_tools(capsys, desk, functions):
    (desk / "board.toml").write_text(BOARD.replace('"open"', '"vivado"'))
    assert run(capsys, "build", "desk", "--package-only") == (0, "one line\n", "")
    assert functions == [("desk", None, True)]


def test_prove_prints_figures_or_what_is_missing(capsys, desk, monkeypatch):
    def prove(board, kernel, *, mutants):
        if kernel == "attend":
            raise BitstreamError("attend must be built")
        figures = {"unexplained": 0, "undriven_pins": 0, "differing_places": mutants - 200, "words_differing": 0}
        return SimpleNamespace(holds=mutants == 200, to_dict=lambda: figures)

    monkeypatch.setattr(subject, "load_function", lambda name: {"prove": prove}[name])
    code, out, _ = run(capsys, "prove", "desk", "--json")
    assert code == 1 and json.loads(out)["attend"] == {"error": "attend must be built"}
    assert {"unexplained", "undriven_pins", "differing_places", "words_differing"} <= json.loads(out)["update"].keys()
    code, out, _ = run(capsys, "prove", "desk", "--kernel", "update")
    assert code == 0 and out.startswith("desk/update: proved by decoding: unexplained 0, undriven_pins 0")
    code, out, _ = run(capsys, "prove", "desk", "--kernel", "update", "--mutants", "201")
    assert code == 1 and out.startswith("desk/update: not proved: unexplained 0, undriven_pins 0, differing_places 1")


def test_estimate_takes_one_kernel_or_all(capsys, desk, functions):
    assert run(capsys, "estimate", "desk")[1] == "update: 12 LUT, 8.25 levels\nattend: 12 LUT, 8.25 levels\n"
    assert run(capsys, "estimate", "desk", "--kernel", "attend")[0] == 0
    assert functions == [("desk", "update"), ("desk", "attend"), ("desk", "attend")]


def test_lint_counts_and_fails_with_complaints(capsys, functions):
    assert run(capsys, "lint") == (0, "good: 0 complaints; waived: 1 A, 2 B\n", "")
    code, out, _ = run(capsys, "lint", "bad")
    assert functions == [None, ["bad"]], "all, or those that are named"
    assert code == 1 and out.endswith("bad: 1 complaints; waived: none\n  bad.v:1: LATCH: a latch\n")


def test_functions_of_missing_packages_state_what_to_install(capsys, desk, monkeypatch):
    monkeypatch.setattr(subject, "entry_points", lambda **_: [])
    code, _, err = run(capsys, "build", "desk")
    assert code == 2 and err.startswith("nearflash: bitstream build must be registered under nearflash.bitstream")

    def load():
        raise ImportError(name="amaranth")

    monkeypatch.setattr(subject, "entry_points", lambda **_: [SimpleNamespace(load=load)])
    code, _, err = run(capsys, "lint")
    assert (code, err) == (2, "nearflash: bitstream lint needs the package 'amaranth'; pip install 'nearflash[dev]'\n")


class Opened:
    """A device with an identity."""

    identity = SimpleNamespace(name="pynq:update-tiny", digest64=0xABC, git_revision=0x22222222)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_deploy_loads_on_the_boards_device(capsys, desk, monkeypatch):
    opened = []
    driver = SimpleNamespace(load=lambda config: (opened.append(config), Opened())[1])
    monkeypatch.setattr("nearflash.device.registry.device_class", lambda spec: (opened.append(spec), driver)[1])
    code, out, _ = run(capsys, "deploy", "desk", "--kernel", "update")
    assert (code, opened) == (0, ["pynq:update-tiny", "update-tiny"])
    assert out == "pynq:update-tiny: loaded, digest 0000000000000abc, git 22222222\n"
    run(capsys, "deploy", "desk", "--kernel", "update", "--backend", "zynq")
    assert opened[2] == "zynq:update-tiny"


@pytest.mark.parametrize(
    ("entries", "message"),
    [({"digest": "3" * 64}, "desk/update must be a build of update-tiny with digest"),
     ({"files": {"update.bit": "4" * 64}}, "must have the SHA-256 of its manifest"),
     ({"files": {}, "evidence": "synthesised", "fmax_hz": 0}, "update must have been built, not only synthesised")],
)  # fmt: skip
def test_deploy_refuses_what_is_not_the_build(capsys, desk, monkeypatch, entries, message):
    monkeypatch.setattr("nearflash.device.registry.device_class", lambda spec: pytest.fail("opened"))
    change(desk, **entries)
    for arguments in ((), ("--to", "host:folder")):
        code, _, err = run(capsys, "deploy", "desk", "--kernel", "update", *arguments)
        assert code == 2 and message in err


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """A program on PATH that runs the command here, in the home of the machine `pynq`; a host `down` fails, and what
    arrives at `noisy` is damaged."""
    folder, home = tmp_path / "bin", tmp_path / "pynq"
    folder.mkdir()
    home.mkdir()
    path = folder / "ssh"
    path.write_text(f"""#!{sys.executable}
import subprocess, sys
options, host, command = sys.argv[1:-2], *sys.argv[-2:]
if options != ["--"] or host == "down":
    sys.exit(255)
if host == "noisy":
    command = command.replace("sha256sum", "echo x >>desk/update.bit; sha256sum")
sys.exit(subprocess.call(["sh", "-c", command], cwd={str(home)!r}))
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return home


def test_deploy_copies_what_the_other_side_needs(capsys, desk, ssh, monkeypatch):
    """board.toml was missing, and the files lay one level too high: the driver there knew no such board."""
    code, out, _ = run(capsys, "deploy", "desk", "--kernel", "update", "--to", "me@pynq:near/flash")
    assert code == 0 and out.splitlines() == [
        "board.toml, update.json, update.bit, update.hwh: in me@pynq:near/flash/desk, with the same SHA-256 as here",
        "there: sudo NEARFLASH_BITSTREAMS=near/flash nearflash selftest --device pynq:update-tiny",
    ]
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(ssh / "near/flash"))
    assert "desk/update: routed, 2 files as built\n" in run(capsys, "verify")[1]


def test_deploy_states_what_did_not_arrive(capsys, desk, ssh):
    code, _, err = run(capsys, "deploy", "desk", "--kernel", "update", "--to", "down:x")
    assert code == 2 and "ssh must copy board.toml, update.json, update.bit, update.hwh to down:x; it failed" in err
    code, _, err = run(capsys, "deploy", "desk", "--kernel", "update", "--to", "noisy:x")
    assert code == 2 and "desk/update.bit must have the same SHA-256 in noisy:x as here, not another" in err


@pytest.mark.parametrize("target", ["pynq", "-oProxyCommand=x:y", "a b:c", "host:", "host:a;b", "host:$HOME"])
def test_deploy_takes_only_names_of_hosts_and_folders(capsys, desk, ssh, target):
    code, _, err = run(capsys, "deploy", "desk", "--kernel", "update", f"--to={target}")
    assert (code, err) == (2, f"nearflash: --to must be USER@HOST:FOLDER, not {target!r}\n")
    assert not list(ssh.iterdir())


def test_deploy_without_ssh_states_the_package(capsys, desk, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run(capsys, "deploy", "desk", "--kernel", "update", "--to", "host:folder")
    assert code == 2 and "apt install openssh-client" in err
