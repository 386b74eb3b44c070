"""What Linux states of this process."""

import subprocess
import sys

import numpy as np

from nearflash.process import fields, peak_resident_bytes

_SIZE = 256 << 20


def test_the_peak_stays_when_memory_is_given_back():
    before = peak_resident_bytes()
    held = np.ones(before + _SIZE, np.uint8)
    del held
    assert peak_resident_bytes() > before + _SIZE


def test_the_peak_of_a_program_has_nothing_of_the_one_that_began_it():
    """Regression: the bench of a model on disk stated its own 4.1 GB as the peak of every case."""
    held = np.ones(_SIZE, np.uint8)
    code = "from nearflash.process import peak_resident_bytes; print(peak_resident_bytes())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1 << 20 < int(run.stdout) < held.nbytes < peak_resident_bytes()


def test_fields_are_read_by_name():
    assert fields("status")["Threads"].isdigit() and int(fields("io")["rchar"]) > 0
