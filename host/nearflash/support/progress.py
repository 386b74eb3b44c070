"""Progress of a command on standard error."""

import sys

__all__ = ["print_step"]


def print_step(line: str, step: int, steps: int, every: int) -> None:
    """Print a line of a step: overwritten on a terminal; elsewhere of the first, the last and each `every`-th step."""
    if sys.stderr.isatty():
        print(f"\r{line:<78}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
    elif step in (1, steps) or step % every == 0:
        print(line, file=sys.stderr, flush=True)
