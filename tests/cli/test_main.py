import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import numpy as np
import pytest

from nearflash.abi.emit import outputs
from nearflash.abi.errors import CommandError, DeviceError
from nearflash.bench import runner
from nearflash.bench.options import Option
from nearflash.cli import emit
from nearflash.cli import main as cli
from nearflash.device.backends.host.update import HostDevice


def run(capsys, *argv):
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_devices_lists_every_backend_and_says_why_not(capsys, monkeypatch):
    monkeypatch.delenv("NEARFLASH_REPLAY", raising=False)
    code, out, _ = run(capsys, "devices")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and {"model:update-tiny", "host:update-smartssd", "verilator:update-tiny"} <= set(lines)
    assert lines["model:update-tiny"].endswith("opens here")
    assert (
        "not here: device 'replay:update-tiny' plays a transcript: set NEARFLASH_REPLAY" in lines["replay:update-tiny"]
    )


def test_selftest_counts_words(capsys):
    code, out, _ = run(capsys, "selftest", "--device", "host:update-tiny", "--params", "33")
    assert code == 0
    # fp32 state; then, of five rules with five arrays in all, bf16 and mx8: whole blocks there, and a scale each.
    words = 33 * (7 * 4 + 11) + 33 * 15 + 64 * 15 + 2 * 5
    # Deltas of both copies, by the byte: the header, a tile's word, and its new words, as most change.
    words += 2 * (33 * 3 + 32 + 8 + 72)
    words += 3 * 64 * 4 + 2 * 2  # a split master with three formats: weight, rest and two moments, mx8 with scales
    assert out.splitlines()[-1] == f"host:update-tiny: {words} words compared with the model, 0 mismatches"


def test_selftest_of_the_attend_kernel(capsys):
    code, out, _ = run(capsys, "selftest", "--device", "model:attend-tiny", "--tokens", "60")
    assert code == 0 and len(out.splitlines()) == 4 + 13
    assert out.splitlines()[-1].endswith(" words compared with the model, 0 mismatches")
    code, _, err = run(capsys, "selftest", "--device", "model:attend-tiny", "--tokens", "9000")
    assert code == 2 and err == "nearflash: tokens must be fewer for the room of attend-tiny, not 9000\n"


def test_selftest_finds_a_wrong_word(capsys, monkeypatch):
    finish = HostDevice._finish

    def broken(self, timeout_s):
        completion = finish(self, timeout_s)
        self.memory.storage.view(np.uint32)[6 * 1024] ^= 1
        return completion

    monkeypatch.setattr(HostDevice, "_finish", broken)
    code, out, _ = run(capsys, "selftest", "--device", "host:update-tiny", "--params", "33")
    assert code == 1 and not out.splitlines()[-1].endswith(" 0 mismatches")


@pytest.mark.parametrize("spec", ["host:update-tiny", "model:attend-tiny"])
def test_a_recorded_selftest_replays(capsys, monkeypatch, tmp_path, spec):
    path, replay = tmp_path / "selftest.jsonl", f"replay:{spec.partition(':')[2]}"
    assert run(capsys, "selftest", "--device", spec, "--record", str(path))[0] == 0
    monkeypatch.setenv("NEARFLASH_REPLAY", str(path))
    assert run(capsys, "selftest", "--device", replay)[0] == 0
    code, _, err = run(capsys, "selftest", "--device", replay, "--seed", "2")
    assert code == 2 and err.startswith("nearflash: line 4 of "), "the first bytes that go down"


def test_errors_are_one_line_without_a_traceback(capsys):
    code, _, err = run(capsys, "selftest", "--device", "fpga:update-tiny")
    assert code == 2 and err.startswith("nearflash: device must be one of {bit,") and "\n" not in err[:-1]
    code, _, err = run(capsys, "selftest", "--params", "-4")
    assert code == 2 and err == "nearflash: params must be at least 1, not -4\n"


def test_other_packages_add_commands(capsys, monkeypatch):
    def add(subparsers: argparse._SubParsersAction) -> None:
        parser = subparsers.add_parser("greet")
        parser.add_argument("name")
        parser.set_defaults(run=lambda arguments: 3 if arguments.name == "you" else None)

    class Point:
        def __init__(self, name, loaded):
            self.name, self.loaded = name, loaded

        def load(self):
            if isinstance(self.loaded, Exception):
                raise self.loaded
            return self.loaded

    points = [Point("synth", ModuleNotFoundError("no", name="pyosys")), Point("greet", add)]
    monkeypatch.setattr(cli, "entry_points", lambda group: points)
    assert "other:\n  greet" in cli.make_parser().format_help()
    assert run(capsys, "greet", "you")[0] == 3
    assert run(capsys, "greet", "them")[0] == 0
    code, _, err = run(capsys, "synth", "update", "--family", "xcup")
    assert code == 2 and "command 'synth' needs the package 'pyosys'; pip install 'nearflash[dev]'" in err


def test_emit_writes_what_is_not_fresh(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(
        emit, "write_outputs", lambda root: ["docs/contracts/abi.json"] if (root / "pyproject.toml").exists() else []
    )
    assert run(capsys, "emit")[:2] == (0, "docs/contracts/abi.json\n")
    monkeypatch.undo()
    assert sorted(emit.write_outputs(tmp_path)) == sorted(outputs())
    (tmp_path / "docs/contracts/abi.json").write_text("old")
    assert emit.write_outputs(tmp_path) == ["docs/contracts/abi.json"]


def test_emit_verilog_names_the_files_that_it_wrote(capsys, monkeypatch, tmp_path):
    asked = []

    def write(full_name, folder):
        asked.append((full_name, folder))
        return [folder / "expand.v"]

    monkeypatch.setattr(emit, "load_function", lambda name, command: {("verilog", "emit"): write}[name, command])
    assert run(capsys, "emit", "verilog", "expand", "-o", str(tmp_path)) == (0, f"{tmp_path}/expand.v\n", "")
    run(capsys, "emit", "verilog", "expand", "--config", "smartssd", "-o", str(tmp_path))
    run(capsys, "emit", "verilog", "expand", "--config", "expand-smartssd", "-o", str(tmp_path))
    assert asked == [("expand-tiny", tmp_path), *[("expand-smartssd", tmp_path)] * 2]


def test_emit_verilog_refuses_a_file_before_it_elaborates(capsys, monkeypatch, tmp_path):
    """Once the error came after a minute, and a full name was an unknown one that the error listed."""
    monkeypatch.setattr(emit, "load_function", lambda name, command: lambda *given: 1 / 0)
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "emit", "verilog", "update", "-o", str(tmp_path / "file"))
    assert code == 2 and "output must be a folder, not the file" in err


def test_bench_goes_through_the_runner(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "nope", "--json"])
    assert ended.value.code == 2 and "invalid choice: 'nope' (choose from 'all', " in capsys.readouterr().err


def bench_kv(parts: Annotated[Sequence[str] | None, Option("Cases.", many=True, choices=("a", "b"))] = None, seed=3):
    yield {"parts": parts, "seed": seed, "mismatches": 1}


@pytest.fixture
def one_bench(monkeypatch):
    monkeypatch.setattr(cli.bench, "load_bench", lambda name: bench_kv)
    monkeypatch.setattr(runner, "load_bench", lambda name: bench_kv)
    monkeypatch.setattr(cli.bench, "bench_names", lambda: ["kv"])


def test_each_bench_has_its_own_options(one_bench, capsys):
    code, out, _ = run(capsys, "bench", "kv", "--parts", "a", "b", "--json")
    assert code == 1 and json.loads(out)["parts"] == ["a", "b"]
    code, out, _ = run(capsys, "bench", "kv", "--json")
    assert json.loads(out)["parts"] is None and json.loads(out)["seed"] == 3
    with pytest.raises(SystemExit):
        cli.main(["bench", "kv", "--help"])
    out = capsys.readouterr().out
    assert "--parts PART [PART ...]" in out and "Cases. Some of a, b." in out and "--seed" not in out
    for wrong in (["--parts", "c"], ["--seed", "4"]):
        with pytest.raises(SystemExit):
            cli.main(["bench", "kv", *wrong])


def test_a_bench_without_its_packages_names_them(monkeypatch, capsys):
    def missing(name):
        raise CommandError(f"bench {name!r} needs the package 'torch'; pip install 'nearflash[dev]'")

    monkeypatch.setattr(cli.bench, "load_bench", missing)
    code, _, err = run(capsys, "bench", "kv")
    assert code == 2 and err == "nearflash: bench 'kv' needs the package 'torch'; pip install 'nearflash[dev]'\n"


@pytest.mark.parametrize("argv", [["--help"], ["bench", "--help"], ["devices", "--help"], ["train", "--help"]])
def test_help_loads_nothing_heavy(argv):
    script = f"""
import sys
from nearflash.cli.main import main
try:
    main({argv})
except SystemExit as ended:
    assert ended.code == 0
loaded = [name for name in ("numpy", "torch", "amaranth", "transformers") if name in sys.modules]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: nearflash" in done.stdout


def subcommands(parser):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield each
                yield from subcommands(each)


def test_every_command_is_in_a_group_and_its_help_is_in_sentences():
    parser = cli.make_parser(everything=True)
    commands = {each.prog.split()[1] for each in subcommands(parser)}
    assert commands <= {name for group in cli.GROUPS.values() for name in group}
    bare = [
        f"{each.prog}: {action.option_strings or action.dest}: {action.help!r}"
        for each in subcommands(parser)
        for action in each._actions
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
        and not re.match(r"[A-Z0-9].*[.)]$", action.help or "")
    ]
    assert not bare, "\n".join(bare)


def test_every_command_shows_an_example():
    parser = cli.make_parser(everything=True)
    names = {each.prog.split()[1]: each for each in subcommands(parser) if len(each.prog.split()) == 2}
    without = [name for name, each in names.items() if f"nearflash {name}" not in str(each.epilog)]
    assert not without


@pytest.mark.parametrize("place", [pytest.param("before", marks=pytest.mark.full), "after"])
def test_loaders_are_silent_unless_asked(monkeypatch, capsys, place):
    monkeypatch.setattr(cli.os, "environ", environment := dict(os.environ, TRANSFORMERS_VERBOSITY="info"))
    environment.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
    argv = ["--verbose", "devices"] if place == "before" else ["devices", "--verbose"]
    assert run(capsys, *argv)[0] == 0 and environment.pop("HF_HUB_DISABLE_PROGRESS_BARS") == "0"
    assert run(capsys, "devices")[0] == 0 and environment["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    assert environment["TRANSFORMERS_VERBOSITY"] == "info", "what the user set stays"


def test_selftest_of_a_backend_takes_its_default_build(capsys):
    code, out, _ = run(capsys, "selftest", "--kernel", "expand", "--columns", "64")
    assert code == 0 and out.splitlines()[-1].startswith("host:expand-smartssd: ")


def test_devices_of_one_kernel(capsys):
    code, out, _ = run(capsys, "devices", "--kernel", "expand")
    assert code == 0 and out.splitlines() and all(":expand-" in line.split()[0] for line in out.splitlines())


def test_a_device_fault_is_an_error_not_a_crash(capsys, monkeypatch):
    def fault(self, timeout_s):
        raise DeviceError("ended with READ_ERROR")

    monkeypatch.setattr(HostDevice, "_finish", fault)
    code, out, err = run(capsys, "selftest")
    assert code == 1 and not err
    assert out.splitlines()[-1].startswith(
        "golden command  FAILED: ended with READ_ERROR; check the kernel's AXI4 ports"
    )


def test_console_script_is_installed():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from nearflash.cli.main import main; sys.exit(main())", "--version"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("nearflash ") and ", abi " in done.stdout


def test_a_reader_that_has_gone_ends_a_command_quietly():
    # Regression: `nearflash bitstream list | head -1` ended with a traceback.
    call = [sys.executable, "-c", "import sys; from nearflash.cli.main import main; sys.exit(main())", "devices"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(call, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_not_taken_for_the_readers(capfd, monkeypatch):
    def run_into_a_broken_pipe(_):
        raise BrokenPipeError

    monkeypatch.setattr(cli.devices, "_run", run_into_a_broken_pipe)
    with pytest.raises(BrokenPipeError):
        cli.main(["devices"])


def test_warnings_are_written_as_errors_are(capsys, monkeypatch):
    """Not with the line of code that they come from, which belongs to nobody who called a command."""
    before, found = warnings.formatwarning, []
    monkeypatch.setattr(cli.devices, "_run", lambda _: found.append(
        warnings.formatwarning(UserWarning("a drive is slow"), UserWarning, "file.py", 7)))  # fmt: skip
    assert run(capsys, "devices")[0] == 0 and found == ["nearflash: a drive is slow\n"]
    assert warnings.formatwarning is before


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left on device: free some, or ask for less"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory: free some, or ask for less"),
        (OSError(21, "Is a directory", "a"), "a cannot be used: Is a directory"),
        (MemoryError(), "memory must hold what the command needs, and does not: ask for less"),
        (MemoryError("Unable to allocate 8 TiB"), "and does not (Unable to allocate 8 TiB): ask for less"),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: you tried\nmore"), "can't allocate memory: you"),
    ],
)
def test_what_the_machine_lacks_is_one_line(capsys, monkeypatch, error, message):
    def fail(_):
        raise error

    monkeypatch.setattr(cli.devices, "_run", fail)
    code, _, err = run(capsys, "devices")
    assert code == 2 and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError(22, "Invalid argument"), KeyError("a"), TypeError()])
def test_a_bug_shows_where_it_is(capsys, monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(cli.devices, "_run", fail)
    with pytest.raises(type(error)):
        cli.main(["devices"])


def test_too_little_address_space_is_one_line(tmp_path):
    """mmap and numpy raise different errors; both had been tracebacks."""
    script = (
        "import numpy, resource, sys\n"
        "from nearflash.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "sys.exit(main(['selftest', '--device', 'model:update-tiny', '--params', str(1 << 32)]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("nearflash: ") and len(done.stderr.splitlines()) == 1


def test_options_are_written_out(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--model", "folder", "--prompt", "text"])
    assert "unrecognized arguments: --prompt" in capsys.readouterr().err


def test_a_wrong_model_or_text_is_an_error_before_torch_is_imported(tmp_path):
    commands = (["generate", "--model", "none", "text"], ["plan", "none"],
                ["compress", "none", "--method", "none", "-o", "out"],
                ["calibrate", "--model", "none", "--texts", __file__],
                ["calibrate", "--model", "none", "--texts", "no text"])  # fmt: skip
    text = "import sys; from nearflash.cli.main import main\n"
    text += f"assert [main(each) for each in {commands}] == [2] * {len(commands)} and 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, text=True, capture_output=True, check=True)
    *models, last = done.stderr.splitlines()
    assert all(line.startswith("nearflash: model must be ") for line in models) and "texts must be" in last
