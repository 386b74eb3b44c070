"""Matrices on the host: equal to the model, each damage named as the model names it."""

from math import prod

import numpy as np
import pytest

from nearflash.abi.bitmap import BitmapHeader
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import StreamFault
from nearflash.device.backends.host.matrix import expand_into, read_rows
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.model.weights import bitmap as model
from nearflash.model.weights.bitmap import expand
from nearflash.storage.io.direct import aligned_buffer
from nearflash.verify.fixtures.matrices import damage, header_of, outcome

PADDING, UNTOUCHED = 10, 77
NAMES = ["-".join(str(part) for part in form) for form in MATRIX_FORMATS]
each_format = pytest.mark.parametrize("form", MATRIX_FORMATS, ids=NAMES)


def as_bytes(stream):
    return np.frombuffer(stream, np.uint8)


def expanded(stream):
    """Dense rows, the bytes behind each, and the number of values."""
    header = BitmapHeader.unpack(stream[:64], len(stream))
    item = header.dense.number_format.bytes
    out = np.full((header.rows, header.columns * item + PADDING), UNTOUCHED, np.uint8)
    values = expand_into(as_bytes(stream), out)
    return out[:, :-PADDING].copy().view(f"<u{item}"), out[:, -PADDING:], values


@each_format
def test_equals_the_model(form):
    for shape, density in (((1, 1), 1.0), ((5, 600), 0.4), ((3, 64), 0.0), ((33, 1023), 0.7), ((2, 95), 0.5)):
        stream = random_matrix(np.random.default_rng(1), shape, density, form)
        dense, behind, values = expanded(stream)
        np.testing.assert_array_equal(dense, expand(stream))
        assert (behind == UNTOUCHED).all()
        assert values == sum(row.present.sum() for row in model.read_rows(stream))


@each_format
def test_the_table_holds_what_the_model_reads(form, monkeypatch):
    stream = random_matrix(np.random.default_rng(3), (7, 300), 0.5, form, 2)
    monkeypatch.setattr("nearflash.device.backends.host.matrix._READ_BYTES", 4 * 300 * 2)
    found = list(read_rows(as_bytes(stream)))
    assert [first for first, _ in found] == ([0, 4] if header_of(stream).dense.number_format.bytes == 2 else [0])
    counts = np.concatenate([table[:, 1] for _, table in found])
    assert counts.tolist() == [row.present.sum() for row in model.read_rows(stream)]


@each_format
def test_each_damage_is_named_as_the_model_does(form):
    rng = np.random.default_rng(2)
    good = random_matrix(rng, (3, 130), 0.5, form, 2)
    header = header_of(good)
    for stream in damage(good, rng, flips=40):
        expected, rows, fault = outcome(stream, header), 0, StreamFault.NONE
        try:
            for _, table in read_rows(as_bytes(stream)):
                rows += len(table)
        except StreamError as error:
            fault = StreamFault(error.fault)
        if expected[0] is not StreamFault.HEADER:  # what a header should have said, its command knows
            assert (fault, rows) == expected


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, id=name, marks=[pytest.mark.full] * (number % 2))
        for number, (form, name) in enumerate(zip(MATRIX_FORMATS, NAMES, strict=True))
    ],
)
def test_large_matrices_are_expanded_in_threads_to_the_same_bits(form):
    """Past the caches into memory that begins with a line, through them into memory that does not."""
    stream = random_matrix(np.random.default_rng(5), (40, 54016), 0.5, form, 8)
    shape = (40, 54016 * header_of(stream).dense.number_format.bytes)
    memory = aligned_buffer(2 * (prod(shape) + 4096))
    lines, others = (memory[first:][: prod(shape)].reshape(shape) for first in (0, prod(shape) + 2))
    assert lines.ctypes.data % 64 == 0 != others.ctypes.data % 64
    assert expand_into(as_bytes(stream), lines) == expand_into(as_bytes(stream), others)
    np.testing.assert_array_equal(lines, others)
    np.testing.assert_array_equal(lines[37:], expand(stream)[37:].view(np.uint8))


def test_a_thread_that_flushes_subnormals_gets_the_same_bits():
    torch = pytest.importorskip("torch")
    form = next(form for form in MATRIX_FORMATS if form[2] is not None and form[2].name == "BF16")
    stream = random_matrix(np.random.default_rng(4), (4, 200), 0.9, form)
    expected = expanded(stream)[0]
    torch.set_flush_denormal(True)
    try:
        np.testing.assert_array_equal(expanded(stream)[0], expected)
    finally:
        torch.set_flush_denormal(False)
