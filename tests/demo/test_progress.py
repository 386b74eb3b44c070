"""Lines in a log, and a bar on a terminal."""

import sys

from nearflash.demo.progress import DemoProgress


def test_lines(capsys):
    with DemoProgress("steps", 2) as progress:
        progress.line("one")
        progress.line("two")
    assert capsys.readouterr().out == "[1/2] one\n[2/2] two\n"


def test_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with DemoProgress("steps", 2) as progress:
        progress.line("one")
    captured = capsys.readouterr()
    assert captured.out == "[1/2] one\n" and "steps" in captured.err
