"""A progress bar on a terminal, plain lines elsewhere."""

import sys
from typing import Any, Self

__all__ = ["DemoProgress"]


class DemoProgress:
    """Counts steps. `line` prints above the bar, so a log holds every line either way."""

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total, self._done = title, total, 0
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, desc=self._title, unit="step", leave=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def line(self, text: str) -> None:
        """One step is done: print what it gave."""
        self._done += 1
        if self._bar is None:
            print(f"[{self._done}/{self._total}] {text}", flush=True)
        else:
            self._bar.write(f"[{self._done}/{self._total}] {text}")
            self._bar.update()
