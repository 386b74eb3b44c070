"""Sanity check of a user's optimizer: its C++ struct against its Python definition, element by element."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError
from nearflash.abi.formats import FP32, fp32_bits
from nearflash.abi.kernel.config import UpdateConfig, update_config
from nearflash.device.memory import PAGE_BYTES, anonymous
from nearflash.sim.hls.kernels import call_of
from nearflash.sim.hls.library import HlsLibrary
from nearflash.sim.hls.rule import HlsRule
from nearflash.sim.hls.vectors import edge_state

__all__ = ["STEPS", "CaseResult", "Difference", "check_rule", "load_rule", "run_kernel"]

STEPS = (1, 2, 1000)
_DECAYS = (0.0, 0.1)
_REALS = ("Fp32", "float")


@dataclass(frozen=True)
class Difference:
    """One parameter's array that is not equal."""

    index: int
    array: str
    inputs: dict[str, int]
    """Patterns of g, p and the arrays before the step."""
    kernel: int
    definition: int

    def __str__(self) -> str:
        """Patterns and values."""
        before = "  ".join(f"{name} {_show(bits)}" for name, bits in self.inputs.items())
        return (f"parameter {self.index}: {self.array} is {_show(self.kernel)} in C++ and "
                f"{_show(self.definition)} in Python\n    from {before}")  # fmt: skip


@dataclass
class CaseResult:
    """One step's scalars on all vectors, with one scalar type of the lanes."""

    rule: HlsRule
    real: str
    words: int = 0
    mismatches: int = 0
    first: list[Difference] = field(default_factory=list)
    """The first of each array."""


def load_rule(path: Path) -> type[HlsRule]:
    """The HlsRule that the .py beside `path` (a .hpp, a .py, or neither) defines. Raises CommandError."""
    file = path.with_suffix(".py")
    if not file.is_file() or not file.with_suffix(".hpp").is_file():
        raise CommandError(f"{path} must be one of a pair {file.name} and {file.with_suffix('.hpp').name}; "
                           "`nearflash hls new NAME` writes one")  # fmt: skip
    name = f"nearflash_hls_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and inspect look
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        where = "".join(traceback.format_exception_only(error)).strip().replace("\n", " ")
        raise CommandError(f"{file} must be Python that can be imported, but {where}") from error
    rules = [value for value in vars(module).values()
             if inspect.isclass(value) and issubclass(value, HlsRule) and value.__module__ == name]  # fmt: skip
    if len(rules) != 1:
        raise CommandError(f"{file} must define one subclass of HlsRule, not {len(rules)}")
    return rules[0]


def check_rule(
    kind: type[HlsRule], *, params: int = 1 << 16, seed: int = 0, config: UpdateConfig | None = None
) -> Iterator[CaseResult]:
    """Steps early and late, with and without weight decay, computed by the host's float and by Fp32.

    Raises CompileError where the struct does not compile, CommandError where names do not fit.
    """
    config = config or update_config("update-smartssd")
    state = edge_state(1 + len(kind.ARRAYS), params, seed)
    for real in _REALS:
        kernel = call_of(kind(lr=1e-3, step=1)).kernel
        library = kernel.library(config, real)
        for step in STEPS:
            for weight_decay in _DECAYS:
                yield _compare(kind(lr=1e-3, step=step, weight_decay=weight_decay), real, library, state)


def run_kernel(library: HlsLibrary, rule: HlsRule, state: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Patterns of p and the arrays after the step, (rows, n); state: g, p, arrays before it, fp32, (1 + rows, n)."""
    call, count = call_of(rule), state.shape[1]
    buffers = [anonymous(-(-state[0].nbytes // PAGE_BYTES) * PAGE_BYTES) for _ in range(2 * len(state) - 1)]
    for buffer, row in zip(buffers, state, strict=False):
        buffer[: row.nbytes] = row.view(np.uint8)
    counters = np.zeros(2, np.uint32)
    addresses = [int(buffer.ctypes.data) for buffer in buffers]
    scalars = [fp32_bits(value) for value in call.scalars.values()]
    library.run([*addresses, 0, count, 0, *scalars, counters.ctypes.data, counters.ctypes.data + 4])
    return np.stack([buffer.view(np.uint32)[:count] for buffer in buffers[len(state) :]])


def _compare(rule: HlsRule, real: str, library: HlsLibrary, state: NDArray[np.float32]) -> CaseResult:
    actual, names = run_kernel(library, rule, state), ("p", *rule.ARRAYS)
    reference = rule.reference(*state)
    if len(reference) != len(names):
        raise CommandError(f"update must return {', '.join(names)}, not {len(reference)} arrays")
    expected = np.stack([np.where(np.isnan(x), np.uint32(FP32.canonical_nan), x.view(np.uint32)) for x in reference])
    differs = actual != expected
    result = CaseResult(rule, real, actual.size, int(np.count_nonzero(differs)))
    for row in np.flatnonzero(differs.any(axis=1)):
        at = int(np.argmax(differs[row]))
        inputs = {name: int(x) for name, x in zip(("g", *names), state[:, at].view(np.uint32), strict=True)}
        result.first.append(Difference(at, names[row], inputs, int(actual[row, at]), int(expected[row, at])))
    return result


def _show(bits: int) -> str:
    return f"{bits:08x} ({np.uint32(bits).view(np.float32):.9g})"
