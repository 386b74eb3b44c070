"""What Linux states of this process."""

import subprocess
import sys

import numpy as np

from nearflash.support.process import fields, peak_resident_bytes

_SIZE = 256 << 20


def _printed(code: str) -> int:
    """What a program of its own prints."""
    lines = f"from nearflash.support.process import peak_resident_bytes\n{code}"
    return int(subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True).stdout)


def test_the_peak_stays_when_memory_is_given_back():
    assert _printed(f"held = b'1' * {_SIZE}\ndel held\nprint(peak_resident_bytes())") > _SIZE


def test_the_peak_of_a_program_has_nothing_of_the_one_that_began_it():
    """Regression: the bench of a model on disk stated its own 4.1 GB as the peak of every case."""
    held = np.ones(_SIZE, np.uint8)
    assert 1 << 20 < _printed("print(peak_resident_bytes())") < held.nbytes < peak_resident_bytes()


def test_fields_are_read_by_name():
    assert fields("status")["Threads"].isdigit() and int(fields("io")["rchar"]) > 0
