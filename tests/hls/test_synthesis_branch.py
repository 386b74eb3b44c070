"""The branch that Vitis takes: tops without threads, stages called one after another, Fp32 as the scalar.

Vitis' hls_stream.h is not ours to have; a queue without a limit stands for it, as in Vitis' own C simulation.
"""

import numpy as np
import pytest

from nearflash.abi.kernel.config import update_config
from nearflash.abi.optimizers import AdamStep, SgdStep
from nearflash.model.update.lane import optimizer_step
from nearflash.sim.hls.build import HLS, build_shim, shim
from nearflash.sim.hls.check import run_kernel
from nearflash.sim.hls.kernels import call_of
from nearflash.sim.hls.library import HlsLibrary
from nearflash.sim.hls.vectors import edge_state

HLS_STREAM = """
#pragma once
#include <queue>
namespace hls {
template <typename T, int Depth = 0>
class stream {
  public:
    stream() = default;
    explicit stream(const char*) {}
    void write(const T& value) { queue_.push(value); }
    T read() { T value = queue_.front(); queue_.pop(); return value; }
  private:
    std::queue<T> queue_;
};
}
"""
VITIS = {"defines": {"__VITIS_HLS__": "1"}, "files": {"hls_stream.h": HLS_STREAM}}
CONFIG = update_config("update-smartssd")


@pytest.mark.parametrize("rule", [AdamStep(1e-3, 4, weight_decay=0.1), SgdStep(1e-2, 2, momentum=0.9)])
def test_committed_tops_compute_the_same_without_threads(rule):
    kernel = call_of(rule).kernel
    text = (HLS / "kernels" / f"{kernel.function}.cpp").read_text()
    library = HlsLibrary.build(kernel.function, text, CONFIG, real="Fp32", **VITIS)
    state = edge_state(1 + len(rule.arrays), 3001, seed=9)
    expected = optimizer_step(rule, *state[:2], **dict(zip(rule.arrays, state[2:], strict=True)))
    for actual, new in zip(run_kernel(library, rule, state), expected.state.values(), strict=True):
        np.testing.assert_array_equal(actual, new.view(np.uint32))


_REPEATED = [pytest.param(name, marks=pytest.mark.full) for name in ("expand_topk", "expand_bitmap")]


@pytest.mark.parametrize("name", ["expand_levels", "update_adamw_topk", *_REPEATED])
def test_expanding_tops_compile_too(name):
    HlsLibrary.build(name, (HLS / "kernels" / f"{name}.cpp").read_text(), CONFIG, real="Fp32", **VITIS)


def test_the_scalar_is_fp32_there_unless_told():
    text = """
#include "nearflash/real.hpp"
static_assert(std::is_same_v<nearflash::Real, nearflash::Fp32>, "");
extern "C" void nothing(int) {}
"""
    defines = {"__VITIS_HLS__": "1", "KERNEL": "nothing", "KERNEL_FILE": '"kernel.cpp"'}
    build_shim("nothing", shim("hls_kernel.cpp"), defines=defines, files={"kernel.cpp": text})
