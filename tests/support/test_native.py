"""C++ that is built once for the processor at hand, and what the vectors that it is written with compute."""

import ctypes
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from nearflash.support import native
from nearflash.support.native import (
    INCLUDE,
    TARGETS,
    CompileError,
    ProcessorLevel,
    find_address,
    load_library,
    pick_target,
)

ANSWER = 'extern "C" int answer() { return 42; }\n'
GENERIC = ProcessorLevel("generic", ("-O1",), frozenset())
"""Of no processor's own instructions."""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def make_source(tmp_path, own_cache):
    def make(text, **headers):
        for name, header in headers.items():
            (tmp_path / f"{name}.hpp").write_text(header)
        source = tmp_path / "loops.cpp"
        source.write_text(text)
        return source

    return make


def test_a_library_is_built_once_and_again_when_a_header_changes(make_source, own_cache):
    source = make_source(
        '#include "number.hpp"\nextern "C" int answer() { return NUMBER; }\n', number="#define NUMBER 1\n"
    )
    for number in (1, 2, 1):
        make_source(source.read_text(), number=f"#define NUMBER {number}\n")
        assert load_library(source).answer() == number
    assert len(list(own_cache.glob("loops-????????????????"))) == 2


def test_two_processes_at_once_build_one_library(make_source, own_cache):
    make_source(ANSWER)
    script = "import sys, pathlib; from nearflash.support.native import load_library\n"
    script += "print(load_library(pathlib.Path(sys.argv[1])).answer())"
    command = [sys.executable, "-c", script, str(make_source(ANSWER))]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["42\n", "42\n"]
    assert len(list(own_cache.glob("loops-????????????????"))) == 1


def test_a_wheels_library_needs_no_compiler(make_source, monkeypatch):
    source = make_source(ANSWER)
    shutil.copy(native.compile_source(source, pick_target()), native.locate_prebuilt(source, pick_target()))
    native.compiler_version.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load_library(source).answer() == 42
    native.locate_prebuilt(source, pick_target()).unlink()
    with pytest.raises(CompileError, match=r"over vectors, but no-such-compiler does not run .*apt install g\+\+"):
        load_library(source)
    monkeypatch.undo()
    native.compiler_version.cache_clear()


def test_importing_builds_nothing(own_cache):
    modules = "nearflash.device, nearflash.device.backends.host.update, nearflash.device.backends.host.matrix"
    subprocess.run([sys.executable, "-c", f"import {modules}"], env=dict(os.environ), timeout=60, check=True)
    assert not own_cache.exists()


def test_an_error_in_the_source_names_its_line(make_source):
    with pytest.raises(CompileError, match=r"source.cpp:2:\d+: .*missing"):
        load_library(make_source("// nothing\nint x = missing;\n"))


@pytest.mark.parametrize("features, name", [(TARGETS[0].features, "x86-64-v4"), (TARGETS[1].features, "x86-64-v3"),
                                            (TARGETS[0].features - {"avx512_vbmi2"}, "x86-64-v3")])  # fmt: skip
def test_the_best_target_that_a_processor_is(monkeypatch, features, name):
    monkeypatch.setattr(native, "_features", lambda: features | {"fpu"})
    assert pick_target.__wrapped__().name == name


def test_another_processor_has_a_target_of_its_own(monkeypatch):
    monkeypatch.setattr(native, "_features", lambda: frozenset(("fpu", "sse2")))
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    assert pick_target.__wrapped__() == ProcessorLevel("x86_64-native", ("-march=native",), frozenset(("fpu", "sse2")))


def test_addresses_of_arrays():
    array = np.arange(12, dtype=np.float32)
    for view in (array, array[3:], array[:0], array.reshape(3, 4)):
        assert find_address(view) == view.ctypes.data
    array.flags.writeable = False
    assert find_address(array) == array.ctypes.data
    for strided in (array[::2], np.zeros(9)[::3]):
        with pytest.raises(ValueError, match="array must be contiguous"):
            find_address(strided)


VECTORS = """
#include "vectors.hpp"
using namespace nearflash;
#define EACH(result, name, argument) \\
    for (int i = 0; i < n; i += LANES) store(out + i, name(load<argument>(in + i)))
extern "C" {
int lanes() { return LANES; }
void halves(const uint16_t *in, float *out, int n) { EACH(F32, fp16_values, U16); }
void to_halves(const float *in, uint16_t *out, int n) { EACH(U16, fp16_patterns, F32); }
void bf16s(const uint16_t *in, float *out, int n) { EACH(F32, bf16_values, U16); }
void to_bf16s(const float *in, uint16_t *out, int n) { EACH(U16, bf16_patterns, F32); }
void roots(const float *in, float *out, int n) { EACH(F32, square_root, F32); }
void bytes(const int32_t *in, uint8_t *out, int n) { EACH(U8, bytes_of, I32); }
void words(const int32_t *in, uint16_t *out, int n) { EACH(U16, words_of, I32); }
void wide_bytes(const uint8_t *in, int32_t *out, int n) { EACH(I32, widen, U8); }
void wide_words(const uint16_t *in, int32_t *out, int n) { EACH(I32, widen, U16); }
void fused(const float *a, const float *b, const float *c, float *out, int n) {
    for (int i = 0; i < n; i += LANES) store(out + i, fma(load<F32>(a + i), load<F32>(b + i), load<F32>(c + i)));
}
}
"""
EVERY = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(scope="module", params=[*TARGETS, GENERIC], ids=lambda target: target.name)
def vectors(request):
    """The library of VECTORS for each target that this processor is."""
    if not request.param.features <= native._features():
        pytest.skip("this processor is another")
    flags = (*native._FLAGS, *request.param.flags)
    return ctypes.CDLL(str(native.build_library("vectors", VECTORS, "tests", flags, folders=[INCLUDE])))


def call(function, *inputs, dtype):
    out = np.empty(len(inputs[0]), dtype)
    function(*(ctypes.c_void_p(find_address(array)) for array in (*inputs, out)), len(out))
    return out


def test_every_number_of_16_bits_is_widened(vectors):
    np.testing.assert_array_equal(call(vectors.halves, EVERY, dtype=np.float32), EVERY.view(np.float16))
    wide = call(vectors.bf16s, EVERY, dtype=np.float32)
    np.testing.assert_array_equal(wide.view(np.uint32), EVERY.astype(np.uint32) << 16)


def test_numbers_are_rounded_to_the_nearest_even_fp16(vectors):
    """Every fp16 number, what lies between two of them, and what is just beside that; too large ones are infinite."""
    own = np.sort(EVERY.view(np.float16)[np.isfinite(EVERY.view(np.float16))]).astype(np.float32)
    middle = (own[:-1] + own[1:]) / 2
    values = np.concatenate([own, middle, np.nextafter(middle, np.float32(9e9)), np.nextafter(middle, np.float32(-9e9)),
                             np.array([65519.9, 65520.0, 1e9, -1e9, 1e-9, -1e-9], np.float32)])  # fmt: skip
    values = np.pad(values, (0, -len(values) % 16))
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    np.testing.assert_array_equal(call(vectors.to_halves, values, dtype=np.uint16), want.view(np.uint16))


def test_numbers_are_rounded_to_the_nearest_even_bf16(vectors):
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    bits[::2] = bits[::2] & 0xFFFF0000 | 0x8000  # halfway
    bits[bits & 0x7FFFFFFF > 0x7F800000] = 0x7FC00000
    want = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    np.testing.assert_array_equal(call(vectors.to_bf16s, bits.view(np.float32), dtype=np.uint16), want)


def test_integers_are_widened_and_cut(vectors):
    wide = np.random.default_rng(4).integers(-(1 << 31), 1 << 31, 1 << 12, dtype=np.int32)
    np.testing.assert_array_equal(call(vectors.bytes, wide, dtype=np.uint8), wide.astype(np.uint8))
    np.testing.assert_array_equal(call(vectors.words, wide, dtype=np.uint16), wide.astype(np.uint16))
    np.testing.assert_array_equal(call(vectors.wide_bytes, wide.astype(np.uint8), dtype=np.int32), wide & 0xFF)
    np.testing.assert_array_equal(call(vectors.wide_words, wide.astype(np.uint16), dtype=np.int32), wide & 0xFFFF)


def test_roots_and_fused_sums_round_once(vectors):
    """(1 + e)(1 - e) is just below one: with c it is no tie, though a rounded product would make it one."""
    rng = np.random.default_rng(5)
    x = np.abs(rng.standard_normal(1 << 12)).astype(np.float32)
    np.testing.assert_array_equal(call(vectors.roots, x, dtype=np.float32), np.sqrt(x))
    e, n = np.float32(2.0**-20), 1 << 12
    a, b = np.full(n, 2.0**-75 * (1 + e), np.float32), np.full(n, 2.0**51 * (1 - e), np.float32)
    c = rng.uniform(1, 2, n).astype(np.float32)
    np.testing.assert_array_equal(call(vectors.fused, a, b, c, dtype=np.float32), c)
