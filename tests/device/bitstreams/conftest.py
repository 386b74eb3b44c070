"""A folder of bitstreams with one small board in it."""

from pathlib import Path

import pytest

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
resources = { lut = 100, ff = 200, dsp = 3, bram36 = 4.5 }
limits.update = { lut = 50, ff = 60, dsp = 2, bram36 = 1, fmax_hz = 40_000_000 }
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the board `desk`, the only one that there is."""
    folder = tmp_path / "bitstreams" / "desk"
    folder.mkdir(parents=True)
    (folder / "board.toml").write_text(BOARD)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(folder.parent))
    return folder
