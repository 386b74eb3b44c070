"""Runs a Tcl script under tclsh with stubs for the vendor's commands; gives back every call."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nearflash.abi.errors import BitstreamError

__all__ = ["RECORDER", "Call", "option", "record"]

Call = tuple[str, ...]
"""A command and its words; objects of the vendor's tools are `kind:name`."""

RECORDER = Path(__file__).with_name("recording.tcl")
_ESCAPES = {r"\\": "\\", r"\t": "\t", r"\n": "\n"}


def record(script: Path, environment: Mapping[str, str] | None = None) -> list[Call]:
    """The calls of a script, in order.

    Raises BitstreamError where tclsh is missing, and with the script's name where a command or option does not exist or
    the script itself fails.
    """
    program = shutil.which("tclsh")
    if program is None:
        raise BitstreamError("tclsh must be installed to run vendor scripts with stubs, not missing (apt install tcl)")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "calls"
        command = [program, str(RECORDER), str(script), str(output)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise BitstreamError(f"{script.name} must run to its end under tclsh: {done.stderr.strip()[-500:]}")
        lines = output.read_text("utf-8").splitlines()
    return [tuple(re.sub(r"\\[\\tn]", lambda found: _ESCAPES[found[0]], word) for word in line.split("\t"))
            for line in lines]  # fmt: skip


def option(call: Call, name: str) -> str | None:
    """The word after an option of a call, or None."""
    return call[call.index(name) + 1] if name in call else None
