"""Models of hard blocks in C++ against others in Python: sums of DSP slices as numbers, block RAMs as single bits."""

import ctypes
import random

import pytest

from nearflash.boards.open.decode import library
from nearflash.support.native import build_library

SOURCE = """#include "blocks.hpp"
using namespace nearflash;
static Dsp<0, 0, 0, 0, 0> plain;
static Dsp<2, 1, 1, 1, 1> piped;
static Ram ram;
extern "C" uint64_t sum(uint64_t a, uint64_t b, uint64_t c, uint64_t pcin, unsigned opmode, unsigned alumode,
                        unsigned carry) {
    plain.A = a; plain.B = b; plain.C = c; plain.PCIN = pcin;
    plain.OPMODE = opmode; plain.ALUMODE = alumode; plain.CARRYIN = carry;
    plain.settle();
    return plain.P;
}
extern "C" uint64_t clocked(uint64_t a, uint64_t b, uint64_t c, unsigned inmode) {
    piped.A = a; piped.B = b; piped.C = c; piped.INMODE = inmode; piped.OPMODE = 0x35;
    piped.CEA1 = piped.CEA2 = piped.CEB2 = piped.CEC = piped.CEM = piped.CEP = 1;
    piped.edge();
    return piped.P;
}
extern "C" void clear() { ram = Ram{}; }
extern "C" uint64_t access(int width, int mode, unsigned enable, unsigned address, unsigned strobe, uint64_t in,
                           int at_b) {
    Ram::Port port{width, width, WriteMode(mode), enable, 0, address, strobe, in};
    Ram::Port other{1, 1, READ_FIRST, 0, 0, 0, 0, 0};
    ram.a = at_b ? other : port;
    ram.b = at_b ? port : other;
    ram.edge();
    return at_b ? ram.B : ram.A;
}
"""
MASK = (1 << 48) - 1


@pytest.fixture(scope="module")
def blocks():
    flags = ("-std=c++17", "-O1", "-fPIC")
    made = ctypes.CDLL(str(build_library("blocks", SOURCE, "a test", flags, folders=(library.FOLDER,))))
    made.sum.argtypes = [ctypes.c_uint64] * 4 + [ctypes.c_uint] * 3
    made.clocked.argtypes = [ctypes.c_uint64] * 3 + [ctypes.c_uint]
    made.access.argtypes = [ctypes.c_int] * 2 + [ctypes.c_uint] * 3 + [ctypes.c_uint64, ctypes.c_int]
    made.sum.restype = made.clocked.restype = made.access.restype = ctypes.c_uint64
    return made


def signed(value, bits):
    return value - (value >> (bits - 1) << bits)


@pytest.mark.parametrize(
    ("opmode", "terms"),
    [
        (0b0000101, lambda a, b, c, p: (0, signed(a & 0x1FFFFFF, 25) * signed(b, 18))),
        (0b0110101, lambda a, b, c, p: (c, signed(a & 0x1FFFFFF, 25) * signed(b, 18))),
        (0b0010101, lambda a, b, c, p: (p, signed(a & 0x1FFFFFF, 25) * signed(b, 18))),
        (0b1010101, lambda a, b, c, p: (signed(p, 48) >> 17, signed(a & 0x1FFFFFF, 25) * signed(b, 18))),
        (0b0110011, lambda a, b, c, p: (c, a << 18 | b)),
        (0b0001111, lambda a, b, c, p: (0, (a << 18 | b) + c)),
    ],
)
def test_a_dsp_slice_adds_what_its_modes_choose(blocks, opmode, terms):
    chance = random.Random(opmode)
    for _ in range(50):
        a, b, c, p = (chance.getrandbits(bits) for bits in (30, 18, 48, 48))
        z, rest = terms(a, b, c, p)
        for carry in (0, 1):
            wanted = {0: z + rest + carry, 1: ~z + rest + carry, 2: ~(z + rest + carry), 3: z - (rest + carry)}
            for mode, value in wanted.items():
                assert blocks.sum(a, b, c, p, opmode, mode, carry) == value & MASK


def test_a_dsp_slice_has_its_registers(blocks):
    chance = random.Random(1)
    given = [tuple(chance.getrandbits(bits) for bits in (24, 17, 40)) for _ in range(30)]
    seen = [blocks.clocked(*values, 0) for values in given]
    for cycle in range(4, len(given)):  # two registers of A, one of B and of C, then those of the product and of P
        (a, _, _), (_, b, _), (_, _, c) = given[cycle - 3], given[cycle - 2], given[cycle - 1]
        assert seen[cycle] == (a * b + c) & MASK
    for _ in range(5):  # INMODE[1] gates A, which is what an open pin behind its inverter does
        last = blocks.clocked(3, 5, 7, 0b00010)
    assert last == 7


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["write-first", "read-first", "no-change"])
@pytest.mark.parametrize(("width", "at_b"), [(1, 0), (2, 0), (4, 1), (9, 0), (9, 1), (18, 0), (18, 1)])
def test_a_block_ram_holds_what_was_written(blocks, width, at_b, mode):
    blocks.clear()
    chance, held, out = random.Random(width), {}, 0
    data_bits = width - width // 9
    for _ in range(400):
        word = chance.randrange(6)
        address = word * data_bits  # of a bit, as the lower address pins are
        enable, is_write = chance.random() < 0.8, chance.random() < 0.5
        data, parity = chance.getrandbits(data_bits), chance.getrandbits(max(width // 9, 0)) if width >= 9 else 0
        value = data | parity << 32
        strobe = (1 << max(2 * (width // 9), 1)) - 1 if is_write else 0
        got = blocks.access(width, mode, enable, address, strobe, value, at_b)
        old = held.get(word, 0)
        if enable and is_write:
            held[word] = value
        if enable and not (is_write and mode == 2):
            out = value if is_write and mode == 0 else old
        assert got == out


def test_bytes_are_written_alone_and_the_wide_port_joins_words(blocks):
    blocks.clear()
    blocks.access(36, 1, 1, 0, 0xFF, 0x0F_89AB_CDEF, 1)
    assert blocks.access(36, 1, 1, 0, 0, 0, 1) == 0xF_89AB_CDEF
    blocks.access(36, 1, 1, 0, 0b0011_0000, 0x0_0055_0000, 1)
    assert blocks.access(36, 1, 1, 0, 0, 0, 0) == 0xB_8955_CDEF
    assert blocks.access(18, 1, 1, 16, 0, 0, 0) == 0x2_0000_8955
    blocks.access(36, 1, 1, 0, 0b0010_0001, 0xF_1111_1111, 1)
    assert blocks.access(36, 1, 1, 0, 0, 0, 0) == 0xB_8915_CDE1, "of each byte the half that its strobe names"
