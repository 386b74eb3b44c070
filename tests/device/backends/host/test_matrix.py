"""Matrices on the host: equal to the model, each damage named as the model names it."""

import numpy as np
import pytest

from nearflash.abi.errors import StreamError
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.matrix import read_dense_rows
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.model.weights.bitmap import expand, read_rows
from nearflash.verify.fixtures.matrices import damaged, header_of, outcome

each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))


def as_bytes(stream):
    return np.frombuffer(stream, np.uint8)


@each_format
def test_equals_the_model(form):
    for shape, density in (((1, 1), 1.0), ((5, 600), 0.4), ((3, 64), 0.0)):
        stream = random_matrix(np.random.default_rng(1), shape, density, form)
        rows, counts = zip(*read_dense_rows(as_bytes(stream)), strict=True)
        np.testing.assert_array_equal(rows, expand(stream))
        assert list(counts) == [row.present.sum() for row in read_rows(stream)]


@each_format
def test_each_damage_is_named_as_the_model_does(form):
    rng = np.random.default_rng(2)
    good = random_matrix(rng, (3, 130), 0.5, form, 2)
    header = header_of(good)
    for stream in damaged(good, rng, flips=40):
        expected, rows, fault = outcome(stream, header), 0, StreamFault.NONE
        try:
            for _ in read_dense_rows(as_bytes(stream)):
                rows += 1
        except StreamError as error:
            fault = StreamFault(error.fault)
        if expected[0] is not StreamFault.HEADER:  # what a header should have said, its command knows
            assert (fault, rows) == expected
