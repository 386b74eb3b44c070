"""Every argument of a command that names a file, given what is no such file: one line that names it, at once."""

import argparse
import contextlib
import io
import os
import signal
import socket
from pathlib import Path

import pytest

from nearflash.cli.main import main, make_parser

MODEL = str(Path(__file__).parents[1] / "data" / "doclm-7m")
KINDS = ("folder", "pipe", "socket", "device", "binary", "empty", "deep", "huge", "long", "zero byte", "loop",
         "missing", "below a file")  # fmt: skip
#: A command for each argument: `@` is what is given. What else it needs is there, or is missing and named later.
READ = [
    "explore check --blind @", "hls check @", "hls analyze @", "hls analyze adamw --report @", "hls kernel @",
    "kv verify @", "kv status @", "plan @", f"plan {MODEL} --hardware @", "tune @", "tune @ --hardware t4",
    "results add @ --page gateware --command x", "results update @ --command x", "results --root @ pages",
    "state status @", "state verify @",
    "state snapshot @ --to snapshot", "state export @ --to exported", "state import @ --to imported",
    "state reshard @ --to resharded", "state delta @ --to versions", "state patch @ --from versions --to patched",
    "compress @ -o compressed", "bitstream list @", "bitstream verify @",
    "bitstream build @", "bitstream deploy @ --kernel update", "bitstream estimate @",
]  # fmt: skip
WRITTEN = [
    "explore kvnand --png @.png", "explore instinfer --png @.png", "explore smart-infinity --png @.svg",
    "explore endor --png @.png", "explore compare --trace @", "explore compare --png @.png",
    "explore report -o @.html", f"plan {MODEL} --hardware t4 -o @", f"plan {MODEL} --hardware t4 --picture @",
    f"plan {MODEL} --hardware t4 --curve @",
    "selftest --device model:update-tiny --params 64 --record @", "hls new abc --folder @",
]  # fmt: skip
FOLDERS = [
    "doctor --folder @", "preflight @", "devices --measure @", "state patch weights.safetensors --from @ --to patched",
]  # fmt: skip
#: They load a model first, build a simulator, or measure the folder for minutes: tests of their own packages.
ELSEWHERE = {
    "calibrate", "compress", "demo", "generate", "train", "trace", "bench", "tune", "plan --folder", "emit verilog -o",
}  # fmt: skip


def made(folder: Path, kind: str) -> str:
    """A path of that kind below the folder."""
    path = folder / "given"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made_one:
            made_one.bind("given")
    elif kind == "huge":
        with path.open("wb") as out:
            out.truncate(10**12)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind in ("binary", "empty", "deep"):
        path.write_bytes({"binary": bytes(range(256)) * 20, "empty": b"", "deep": b"[" * 100_000}[kind])
    elif kind == "below a file":
        path.write_text("")
    names = {"device": "/dev/zero", "long": str(folder / ("n" * 300)), "zero byte": str(folder / "a\0b"),
             "missing": str(folder / "no" / "such"), "below a file": str(path / "x")}  # fmt: skip
    return names.get(kind, str(path))


def outcome(command: str, given: str) -> tuple[int, str]:
    """Exit code, and what went to standard error; an error where it takes a minute."""

    def late(*_):
        raise AssertionError(f"{command} waits for {given}")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    err = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main([part.replace("@", given) for part in command.split()])
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return code, err.getvalue()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize("command", READ)
def test_what_is_read_must_be_such_a_file(command, tmp_path):
    for kind in KINDS:
        (tmp_path / "work" / kind).mkdir()
        os.chdir(tmp_path / "work" / kind)
        code, err = outcome(command, made(Path.cwd(), kind))
        assert code in (1, 2), (kind, code, err)
        assert code == 1 or err.splitlines()[-1].startswith("nearflash"), (kind, err)


@pytest.mark.parametrize("command", WRITTEN)
def test_what_is_written_replaces_no_such_thing(command, tmp_path):
    """A file that is there is replaced, whatever it holds; nothing else is, and a device is not written to."""
    for kind in ("folder", "pipe", "socket", "device", "long", "zero byte", "missing", "below a file"):
        (tmp_path / "work" / kind).mkdir()
        os.chdir(tmp_path / "work" / kind)
        given, ending = made(Path.cwd(), kind), command.partition("@")[2].split(" ")[0]
        if ending and kind in ("folder", "pipe", "socket"):
            Path(given).rename(given + ending)
        if (kind == "folder" and "--folder" in command) or (kind == "device" and ending):
            continue
        if kind == "missing" and "--folder" in command:
            continue
        before = os.lstat(given + ending) if kind in ("folder", "pipe", "socket", "device") else None
        code, err = outcome(command, given)
        assert code == 2 and err.splitlines()[-1].startswith("nearflash"), (kind, code, err)
        if before is not None:
            assert os.lstat(given + ending)[:4] == before[:4], kind


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_must_be_one(command, tmp_path):
    for kind in KINDS[1:]:
        (tmp_path / "work" / kind).mkdir()
        os.chdir(tmp_path / "work" / kind)
        code, err = outcome(command, made(Path.cwd(), kind))
        assert code in (1, 2) and (code == 1 or err.splitlines()[-1].startswith("nearflash")), (kind, code, err)


def arguments_of_files(parser: argparse.ArgumentParser, prefix: str = ""):
    """Command and argument of everything that is a path, or whose metavar says so."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                yield from arguments_of_files(each, f"{prefix} {name}".strip())
        elif action.type is Path or str(action.metavar) in ("FILE", "FOLDER", "DIR", "MODEL"):
            yield prefix, action.option_strings, action.nargs


def test_every_argument_that_names_a_file_is_tried():
    tried = [*READ, *WRITTEN, *FOLDERS]
    missing = []
    for command, options, _ in arguments_of_files(make_parser(everything=True)):
        if command.split()[0] in ELSEWHERE or any(f"{command} {option}" in ELSEWHERE for option in options):
            continue
        lines = [line for line in tried if all(word in line.split() for word in command.split())]
        if not any(not options or any(option in line.split() for option in options) for line in lines):
            missing.append(f"{command} {'/'.join(options)}")
    assert not missing
