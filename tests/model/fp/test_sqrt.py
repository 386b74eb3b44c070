import numpy as np

from nearflash.abi.optimizers import AdagradStep, AdamStep, Profile
from nearflash.model.fp.sqrt import sqrt, square_root
from nearflash.model.update import lane
from nearflash.verify.fixtures.softfloat import softfloat
from nearflash.verify.fixtures.vectors import operands


def test_equals_softfloat():
    (a,) = operands(60_000, 1, seed=4)
    bits, flags = sqrt(a)
    expected, expected_flags = softfloat("sqrt", a)
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(flags, expected_flags)
    assert set(np.unique(flags)) == {0, 1, 16}


def test_squares_are_exact():
    roots = np.arange(1, 4096, dtype=np.float32)
    bits, flags = sqrt((roots * roots).view(np.uint32))
    np.testing.assert_array_equal(bits.view(np.float32), roots)
    assert not flags.any()


def test_roots_are_those_of_a_double_rounded(monkeypatch):
    """On a PYNQ-Z2's own Python the model's parameters were wrong in 18 of 200: NumPy's fp32 root there is no root."""
    values = np.arange(0x3F00_0000, 0x4080_0000, 97, dtype=np.uint32).view(np.float32)
    assert (square_root(values) == np.sqrt(values)).all()
    taken, root = [], np.sqrt
    monkeypatch.setattr(np, "sqrt", lambda x: taken.append(x.dtype) or root(x))
    sqrt(values.view(np.uint32))
    adams = [AdamStep(1e-3, 3, profile=profile) for profile in Profile]
    for rule in (*adams, AdagradStep(1e-3, 3)):
        state = [values[:16]] * (4 if isinstance(rule, AdamStep) else 2)
        named = dict(zip(("g", "p", "m", "v"), state, strict=False)) | {"v": values[:16]}
        lane.optimizer_step(rule, **named)
    assert len(taken) == 5 and set(taken) == {np.dtype(np.float64)}
