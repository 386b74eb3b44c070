"""The same matrices on every device: the same bits, the same counts, the same errors."""

import struct
from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import AddressError, CommandError, StreamError
from nearflash.device.drivers.expand import expand_command, expand_matrix
from nearflash.device.selftest.expand import MATRIX_FORMATS, random_matrix
from nearflash.model.weights.bitmap import expand, read_rows
from nearflash.verify.fixtures.matrices import header_of

KERNEL = "expand"
PLAIN = MATRIX_FORMATS[0]


def by_hand(element, coding, output, columns, *sections):
    """Stream of one row, put together from docs/contracts/weights.md alone: sections, each in a block of its own."""
    body = b"".join(section.ljust(64, b"\0") for section in sections)
    fields = (element, coding, 1, columns, 1, 64 if output else 0, output, 64 + len(body) + 64)
    header = struct.pack("<4sHBBIIIHBxQ28x", b"NFBM", 1, *fields)
    return b"".join((header, crc32c(header).to_bytes(4, "little"), body, struct.pack("<II56x", 0, crc32c(body))))


LOW, HIGH, VALUES = b"\x04", b"\x00\xa0\x00", [0x0000, 0x3C00, 0xC100, 0x3C01]
"""0, 1.0, -2.5 and the number behind 1.0: their lowest bits, signs and upper bits, patterns."""
GOLDEN = {
    # Exponents 15 and 16 in the codebook, so no section of escapes; then all three as escapes.
    "fp16 coded": (by_hand(1, 1, 0, 4, b"\x0f\x10\x00", b"\x0e", LOW, b"\x10\x00", HIGH), VALUES),
    "fp16 escaped": (by_hand(1, 1, 0, 4, b"", b"\x0e", LOW, b"\x33\x03", b"\x0f\x10\x0f", HIGH), VALUES),
    # Codes 0 and 15 with scale 0.5 and minimum -1, and an element without a value.
    "int4 to fp16": (by_hand(4, 0, 1, 3, b"\x03", b"\x00\x38\x00\xbc", b"\xf0"), [0xBC00, 0x4680, 0x0000]),
    "int8": (by_hand(3, 0, 0, 9, b"\x01\x01", b"\x7f\x80"), [0x7F, 0, 0, 0, 0, 0, 0, 0, 0x80]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_matrices_by_hand(device, name):
    stream, dense = GOLDEN[name]
    np.testing.assert_array_equal(expand_matrix(device, stream).dense[0], dense)


@pytest.mark.parametrize("form", MATRIX_FORMATS, ids=lambda form: "-".join(str(part) for part in form))
def test_matrices_expand_to_what_the_model_says(device, form):
    rng = np.random.default_rng(1)
    for shape, density in (((1, 1), 1.0), ((4, 513), 0.5), ((6, 64), 0.1)):
        stream = random_matrix(rng, shape, density, form)
        done, header = expand_matrix(device, stream), header_of(stream)
        np.testing.assert_array_equal(done.dense, expand(stream))
        command, port_bytes = expand_command(header, 0, 0), device.identity.config.port_bytes
        assert {name: done.counters[name] for name in ("rows_done", "elements_done", "values_done")} == {
            "rows_done": shape[0],
            "elements_done": shape[0] * shape[1],
            "values_done": sum(int(row.present.sum()) for row in read_rows(stream)),
        }
        assert done.counters["read_beats"] == len(stream) // port_bytes
        assert done.counters["write_beats"] == command.out_bytes // port_bytes


def test_a_damaged_matrix_is_refused_by_name_and_the_next_one_is_good(device):
    good = random_matrix(np.random.default_rng(2), (4, 300), 0.5, PLAIN)
    bad = good[:-64] + bytes([good[-64] ^ 1]) + good[-63:]
    with pytest.raises(StreamError, match=r"a bitmap matrix must have the CRC32C.*; compress the weights again"):
        expand_matrix(device, bad)
    np.testing.assert_array_equal(expand_matrix(device, good).dense, expand(good))


def test_another_matrix_than_the_command_is_for(device):
    stream = random_matrix(np.random.default_rng(3), (4, 300), 0.5, PLAIN)
    source, target = device.allocate(len(stream)), device.allocate(1 << 14)
    source.host[:] = np.frombuffer(stream, np.uint8)
    source.sync_to_device()
    command = expand_command(header_of(stream), source.address, target.address)
    with pytest.raises(StreamError, match="must begin with the header of a bitmap matrix of the shape and format"):
        device.run(replace(command, rows=5))
    with pytest.raises(AddressError, match="dense write range must lie in one allocated buffer"):
        device.submit(replace(command, rows=50))
    with pytest.raises(CommandError, match="rows must be between 1 and"):
        device.submit(replace(command, rows=0))
    device.free(source)
    device.free(target)
