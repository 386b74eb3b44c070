"""Yosys in a process of its own: it may crash, and its memory goes back."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["yosys"]


def yosys(folder: Path, passes: Sequence[str], log: str = "yosys.log", timeout_s: int = 600) -> bool:
    """Run `passes` in `folder`; whether all of them succeeded, in time. The output is in `folder/log`."""
    (folder / "passes.txt").write_text("\n".join(passes))
    script = "from pyosys import libyosys as y; d = y.Design()\nfor p in open('passes.txt'): y.run_pass(p.strip(), d)"
    command = [sys.executable, "-c", script]
    with (folder / log).open("w") as sink:
        try:
            done = subprocess.run(
                command, cwd=folder, stdout=sink, stderr=subprocess.STDOUT, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
