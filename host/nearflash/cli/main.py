"""The `nearflash` command: one parser from the commands of all packages, grouped by what they are for.

Other packages add commands through the entry-point group `nearflash.command`: name -> `module:function`, where
`function(subparsers)` adds a parser whose default `run` takes the parsed arguments and returns the exit code; or one
with an option `--json`, whose default `rows` takes the parsed arguments and yields dicts, printed as a bench's are.
Only the module of the command that is called gets imported; what `nearflash --help` shows of it stands in GROUPS.
"""

import argparse
import errno
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from nearflash import abi
from nearflash.abi.errors import CommandError, NearflashError
from nearflash.bench.runner import print_rows, with_origin
from nearflash.cli import bench, bitstream, device_server, devices, emit, selftest
from nearflash.cli.help import HelpFormatter, set_conventions
from nearflash.support.arguments import reject_ineffective
from nearflash.support.release import release

__all__ = ["GROUPS", "main", "make_parser"]

ENTRY_POINTS = "nearflash.command"
GROUPS = {
    "use": {
        "train": "Fine-tune a model with its optimizer state on flash.",
        "generate": "Continue prompts with the KV cache on flash.",
        "calibrate": "Find the attention policy of a model, by KV head.",
        "plan": "Find the fastest way to generate that fits a machine, before anything is loaded.",
        "tune": "Find the plan for a model on this machine and keep it beside the model.",
        "compress": "Prune or quantise a model's weights and write them compressed.",
        "preflight": "Check whether optimizer state fits a drive, how fast it is, and how long it lasts.",
        "state": "Show, verify, copy or convert the state files of an optimizer.",
        "kv": "Show or verify the files of a KV cache, or of a KV tier.",
        "doctor": "List what of this machine is in the way, with remedies.",
        "devices": "List devices and whether they open here.",
        "demo": "Fine-tune a small model through the simulated gateware and check every word.",
    },
    "inspect": {
        "bench": "Measure, one JSON object a line with --json.",
        "explore": "Model near-storage systems and explore their designs, beside what papers publish.",
        "trace": "Show a simulated kernel at work: a trace, a picture, waves.",
        "results": "Write the pages of docs/results from the benches' JSON.",
        "device-server": "Drive a board of this machine for another one, over ssh.",
        "selftest": "Bring a board up, and compare random commands on a device with the reference model.",
    },
    "develop": {
        "sim": "Run one cocotb testbench on Verilator.",
        "formal": "Prove the stream elements and the AXI masters.",
        "mutation": "Change units in many places and count the changes that their vectors notice.",
        "synth": "Estimate resources and logic depth of a kernel with Yosys.",
        "hls": "Start, check and estimate an optimizer of your own for the HLS kernels.",
        "bitstream": "List, build, verify and deploy the bitstreams of boards.",
        "emit": "Write a kernel's Verilog, or the generated headers and tables of this checkout.",
    },
}
"""What `nearflash --help` shows: commands by purpose, each with one sentence."""
_OWN = {
    "bench": bench.add,
    "bitstream": bitstream.add,
    "device-server": device_server.add,
    "devices": devices.add,
    "emit": emit.add,
    "selftest": selftest.add,
}
_SENTENCES = {name: text for group in GROUPS.values() for name, text in group.items()}
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
"""What silences the loaders of models, which read it when they are imported."""
_VERBOSE = {"HF_HUB_DISABLE_PROGRESS_BARS": "0"}
_SHORT_OF = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_NO_MEMORY = "can't allocate memory"
"""In torch's RuntimeError on the host; on a GPU its class is OutOfMemoryError."""
_UNREAD, _INTERRUPTED = 128 + signal.SIGPIPE, 128 + signal.SIGINT
"""Exit codes of a command whose output nobody reads any more, and of one that SIGINT ended: a shell's for these."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 a check failed, 2 an error that the message explains,
    130 interrupted from the keyboard, 141 where the reader of its output has gone."""
    given = sys.argv[1:] if argv is None else argv
    called = next((argument for argument in given if not argument.startswith("-")), None)
    others, warnings.formatwarning = warnings.formatwarning, _warning_text
    try:
        if any("\0" in argument for argument in given):
            raise CommandError("arguments must be without zero bytes, which no name of a file has")
        arguments = make_parser(called).parse_args(given)
        reject_ineffective(arguments)
        loaders = _VERBOSE if arguments.verbose else _QUIET
        os.environ.update({name: value for name, value in loaders.items() if name not in os.environ})
        if hasattr(arguments, "rows"):
            rows = map(with_origin, arguments.rows(arguments))
            code = 1 if print_rows(rows, as_json=arguments.json) else 0
        else:
            code = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
        return code
    except NearflashError as error:
        print(f"nearflash: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        if not _reader_has_gone():
            raise
        # What is left of the output must not fail a second time at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD
    except KeyboardInterrupt:  # behind the command's own handlers, which undo what it began
        print("nearflash: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (OSError, MemoryError, RuntimeError) as error:
        if (message := _of_the_machine(error)) is None:
            raise
        print(f"nearflash: {message}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = others


def _of_the_machine(error: OSError | MemoryError | RuntimeError) -> str | None:
    """Describe an error of files, drives or memory; None for any other, which is a bug and shows where it is."""
    if isinstance(error, OSError):
        if error.filename is not None:
            return f"{error.filename} cannot be used: {error.strerror}"
        return f"{error.strerror}: free some, or ask for less" if error.errno in _SHORT_OF else None
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _NO_MEMORY in str(error):
        detail = (str(error).strip().splitlines() or [""])[0][:200]
        return f"memory must hold what the command needs, and does not{detail and f' ({detail})'}: ask for less"
    return None


def _reader_has_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more, as behind `head`; another pipe may have broken."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as errors are written: its place in the code helps nobody who called a command."""
    return f"nearflash: {message}\n"


def make_parser(called: str | None = None, *, everything: bool = False) -> argparse.ArgumentParser:
    """The parser of all commands, of which only `called` has its options, or everything has."""
    parser = argparse.ArgumentParser(
        "nearflash",
        usage="nearflash [--version] [--verbose] COMMAND [OPTION ...]",
        description="Near-storage computing for large language models.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"nearflash {release()}, abi {abi.ABI_VERSION}",
        help="Show the versions of nearflash and of its device contract.",
    )
    parser.add_argument("--verbose", action="store_true", help="Show progress bars and warnings of model loaders.")
    subparsers = parser.add_subparsers(prog="nearflash", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for name in sorted(_OWN.keys() | points.keys()):
        if name != called and not everything and name in _SENTENCES:
            subparsers.add_parser(name, help=_SENTENCES[name])
            continue
        _add_command(subparsers, name, points.get(name))
    for name, action_parser in subparsers.choices.items():
        action_parser.add_argument("--verbose", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        action_parser.description = action_parser.description or _SENTENCES.get(name)
    set_conventions(parser)
    parser.epilog = _listing({name: _SENTENCES.get(name) or _help(subparsers, name) for name in subparsers.choices})
    return parser


def _add_command(subparsers: Any, name: str, point: EntryPoint | None) -> None:
    if point is None:
        _OWN[name](subparsers)
        return
    try:
        point.load()(subparsers)
    except ImportError as missing:
        _add_missing(subparsers, name, missing)


def _add_missing(subparsers: Any, name: str, missing: ImportError) -> None:
    reason = f"needs the package {missing.name!r}; pip install 'nearflash[dev]'"

    def run(_: argparse.Namespace) -> int:
        raise CommandError(f"command {name!r} {reason}")

    parser = subparsers.add_parser(name, help=reason)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _help(subparsers: Any, name: str) -> str:
    """The help text that a command of another package was added with."""
    return next((str(action.help or "") for action in subparsers._choices_actions if action.dest == name), "")


def _listing(sentences: dict[str, str]) -> str:
    """Commands by group, those of other packages last."""
    groups = {title: [name for name in names if name in sentences] for title, names in GROUPS.items()}
    groups["other"] = [name for name in sentences if name not in _SENTENCES]
    lines = [
        line
        for title, names in groups.items()
        if names
        for line in (f"{title}:", *(f"  {name:<14}{sentences[name]}" for name in names), "")
    ]
    return "\n".join([*lines, "`nearflash COMMAND --help` shows a command's options and examples."])
