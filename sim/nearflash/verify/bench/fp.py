"""Bench `fp`: the Verilated units against the model and Berkeley SoftFloat, results and exceptions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.formats import BF16, FP16, NumberFormat
from nearflash.gateware.fp.add import Add
from nearflash.gateware.fp.convert import FromNarrow, ToNarrow
from nearflash.gateware.fp.div import Div
from nearflash.gateware.fp.mul import Mul
from nearflash.gateware.fp.muladd import MulAdd
from nearflash.gateware.fp.raw import RawLayout
from nearflash.gateware.fp.sqrt import Sqrt
from nearflash.model.fp.add import add
from nearflash.model.fp.convert import from_narrow, to_narrow
from nearflash.model.fp.div import div
from nearflash.model.fp.mul import mul
from nearflash.model.fp.muladd import RECIPROCAL_BITS, Reciprocal, mul_reciprocal, muladd
from nearflash.model.fp.sqrt import sqrt
from nearflash.sim.verilator.burst import BurstUnit
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.fixtures.fp32_unit import Fp32Unit
from nearflash.verify.fixtures.softfloat import softfloat
from nearflash.verify.fixtures.vectors import corner_pairs, narrow_operands, operands

__all__ = ["OPERATIONS", "VECTORS", "FpOperation", "run"]

Columns = list[NDArray[Any]]
#: Vectors of each operation; of `add`, `mul` and `div` the first ones are all pairs of corner values.
VECTORS = {
    "add": 8_000_000,
    "mul": 8_000_000,
    "div": 8_000_000,
    "fma": 6_500_000,
    "fma_51": 2_000_000,
    "muladd": 3_000_000,
    "div_by_invariant": 3_000_000,
    "sqrt": 4_000_000,
    "to_fp16": 2_000_000,
    "to_bf16": 2_000_000,
    "from_fp16": 65_536,
    "from_bf16": 65_536,
}
_BLOCK = 500_000


@dataclass(frozen=True)
class FpOperation:
    """How one operation is compared: unit, operand ports, operands from (count, seed), model, run-time bits, oracle."""

    core: Callable[[], Any]
    ports: str
    operands: Callable[[int, int], Columns]
    model: Callable[..., Any]
    controls: Mapping[str, int]
    oracle: str | None = None
    """SoftFloat's name of the operation, where it has one."""


def run(vectors: Mapping[str, int] | None = None, seed: int = 0) -> Iterator[dict[str, Any]]:
    """One object for each operation in `vectors` (by default VECTORS): op, vectors, mismatches, latency, against.

    A mismatch is a vector whose result or exceptions differ from the model's or, where `against` names it, from
    Berkeley SoftFloat's. `digest` is that of the unit's design.
    """
    for op, count in (vectors or VECTORS).items():
        compared, mismatches, unit = (_by_invariant if op == "div_by_invariant" else _compare)(op, count, seed)
        has_oracle = op in OPERATIONS and OPERATIONS[op].oracle
        yield {
            "config": "fp32",
            "digest": unit.digest,
            "op": op,
            "vectors": compared,
            "exhaustive": op.startswith("from_") and compared == 1 << 16,
            "mismatches": mismatches,
            "against": "model, SoftFloat" if has_oracle else "model",
            "latency_cycles": unit.stated_latency,
            "unit": "vectors",
        }


def _pairs(count: int, seed: int) -> Columns:
    corners = corner_pairs()
    chosen = corners if count >= len(corners[0]) else [column[:: len(column) // count + 1] for column in corners]
    rest = operands(count - len(chosen[0]), 2, seed)
    return [np.concatenate(columns) for columns in zip(chosen, rest, strict=True)]


def _narrow(number: NumberFormat) -> FpOperation:
    def columns(count: int, seed: int) -> Columns:
        return [np.concatenate([*operands(count // 2, 1, seed), narrow_operands(count - count // 2, number, seed)])]

    return FpOperation(ToNarrow, "i", columns, lambda a: to_narrow(a, number), {"bf16": int(number == BF16)},
                     f"to_{number.name}")  # fmt: skip


def _wide(number: NumberFormat) -> FpOperation:
    def columns(count: int, seed: int) -> Columns:
        return [np.arange(count, dtype=np.uint16)]

    return FpOperation(
        FromNarrow, "i", columns, lambda a: (from_narrow(a, number), None), {"bf16": int(number == BF16)}
    )


def _three(count: int, seed: int) -> Columns:
    return operands(count, 3, seed)


def _fuse(a: Any, b: Any, c: Any) -> Any:
    return muladd(a, b, c, fused=True)


#: Every operation but `div_by_invariant`, whose operands come scalar by scalar.
OPERATIONS = {
    "add": FpOperation(Add, "ab", _pairs, add, {}, "add"),
    "mul": FpOperation(Mul, "ab", _pairs, mul, {}, "mul"),
    "div": FpOperation(Div, "ab", _pairs, div, {}, "div"),
    "fma": FpOperation(MulAdd, "abc", _three, _fuse, {"fused": 1}, "fma"),
    "fma_51": FpOperation(lambda: MulAdd(RECIPROCAL_BITS), "abc", _three, _fuse, {"fused": 1}, "fma"),
    "muladd": FpOperation(MulAdd, "abc", _three, lambda a, b, c: muladd(a, b, c, fused=False), {"fused": 0}),
    "sqrt": FpOperation(Sqrt, "a", lambda count, seed: operands(count, 1, seed), sqrt, {}, "sqrt"),
    "to_fp16": _narrow(FP16),
    "to_bf16": _narrow(BF16),
    "from_fp16": _wide(FP16),
    "from_bf16": _wide(BF16),
}


def _compare(op: str, count: int, seed: int) -> tuple[int, int, BurstUnit]:
    operation = OPERATIONS[op]
    core = operation.core()
    unit = BurstUnit(Fp32Unit(core), f"fp_{type(core).__name__.lower()}")
    columns = operation.operands(count, seed)
    mismatches = 0
    for start in range(0, count, _BLOCK):
        block = [column[start : start + _BLOCK] for column in columns]
        got = unit.run({**dict(zip(operation.ports, block, strict=True)), **operation.controls})
        differ = _differences(got, *operation.model(*block))
        if operation.oracle:
            differ |= _differences(got, *softfloat(operation.oracle, *block))
        mismatches += int(np.count_nonzero(differ))
    return count, mismatches, unit


def _by_invariant(_: str, count: int, seed: int) -> tuple[int, int, BurstUnit]:
    """Products with the reciprocals of scalars, 1,000 dividends each: those near a rounding boundary among them."""
    layout = RawLayout(RECIPROCAL_BITS)
    unit = BurstUnit(Fp32Unit(MulAdd(RECIPROCAL_BITS), unpacked=("b",)), "fp_muladd")
    each = min(count, 1_000)
    scalars = operands(2 * count // each + 16, 1, seed)[0].view(np.float32)
    scalars = scalars[np.isfinite(scalars) & (scalars != 0)][: count // each]
    rng, mismatches = np.random.default_rng(seed), 0
    for k, s in enumerate(scalars.tolist()):
        reciprocal = Reciprocal.of(s)
        boundaries = (2 * rng.integers(1 << 23, 1 << 24, each // 2) + 1) / 2.0 ** rng.integers(20, 28)
        with np.errstate(all="ignore"):
            near = (s * boundaries).astype(np.float32).view(np.uint32) + rng.integers(0, 3, each // 2, np.uint32)
        a, c = operands(each, 2, seed + k)
        a[: each // 2] = near
        c[::2] = 1 << 31  # -0: the quotient alone
        b = layout.const({"sig": reciprocal.sig, "exp": reciprocal.exp, "sign": reciprocal.sign}).as_value().value
        got = unit.run({"a": a, "b": words_from_integers([b], layout.size)[0], "c": c, "fused": 0})
        product, product_flags = mul_reciprocal(a, reciprocal)
        total, sum_flags = add(product, c)
        mismatches += int(np.count_nonzero(_differences(got, total, product_flags | sum_flags)))
    return each * len(scalars), mismatches, unit


def _differences(got: Mapping[str, NDArray[Any]], bits: NDArray[Any], flags: NDArray[Any] | None) -> Any:
    differ = got["o"] != bits
    return differ if flags is None else differ | (got["flags"] != flags)
