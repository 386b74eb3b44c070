"""Vectors of the exact multiply-accumulate unit: whole accumulators, from the model."""

from typing import Any

import numpy as np
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import EXACT_LSB, QK_BITS, SCORE_LSB, score_limit_log2
from nearflash.gateware.attention.numerics.dot import LANES
from nearflash.gateware.attention.numerics.mac import ExactMac
from nearflash.model.attention.numerics.dot import dot_truncated, exact_dot
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.target import Target

__all__ = ["TARGET", "ObservedMac", "vectors"]

_DOTS = 1500
_RESULTS = ("o", "o_nonfinite", "o_exceeds")


class ObservedMac(wiring.Component):
    """ExactMac, its results zero where they mean nothing."""

    LATENCY = ExactMac.LATENCY

    def __init__(self) -> None:
        self._mac = ExactMac()
        super().__init__(self._mac.signature)

    def elaborate(self, platform: Any) -> Module:
        """Build the unit and the gates."""
        m = Module()
        m.submodules.mac = mac = self._mac
        for name, member in self.signature.members.items():
            if member.flow == In:
                for outer, inner in zip(_each(getattr(self, name)), _each(getattr(mac, name)), strict=True):
                    m.d.comb += inner.eq(outer)
        m.d.comb += self.o_valid.eq(mac.o_valid)
        with m.If(mac.o_valid):
            m.d.comb += self.o_nonfinite.eq(mac.o_nonfinite)
            with m.If(~mac.o_nonfinite):
                m.d.comb += [self.o.eq(mac.o), self.o_exceeds.eq(mac.o_exceeds)]
        return m


def _each(port: Any) -> list[Any]:
    return list(port) if isinstance(port, list) else [port]


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Dot products of 1 to 64 beats with idle beats (of other values) between; one row a cycle."""
    columns: dict[str, list[NDArray[Any]]] = {}
    sums: list[int] = []
    for _ in range(_DOTS):
        beats = int(rng.choice([1, 2, 3, 5, 9, 17, 64], p=[0.6, 0.1, 0.1, 0.07, 0.06, 0.04, 0.03]))
        a, b = _operands(rng, beats)
        truncate, shift = int(rng.integers(2)), int(rng.integers(16))
        finite = bool(np.isfinite(a).all() and np.isfinite(b).all())
        limit = 2.0 ** (1 + score_limit_log2(1 << min(shift, 8)))
        exceeds = finite and bool((np.abs(a.astype(float) * b.astype(float)) >= limit).any())
        if finite:
            exact = int(dot_truncated(a, b)) << SCORE_LSB - EXACT_LSB if truncate else int(exact_dot(a[None], b)[0])
        rows = np.sort(rng.choice(beats + beats // 3 + 1, beats, replace=False))  # the others are idle
        count = int(rows[-1]) + 1
        for name, values in (("a", a), ("b", b)):
            for lane in range(LANES):
                column = rng.integers(0, 1 << 16, count, dtype=np.uint16)
                column[rows] = values[lane::LANES].view(np.uint16)
                columns.setdefault(f"{name}__{lane}", []).append(column)
        place = np.arange(count)
        valid, end = np.isin(place, rows), place == rows[-1]
        noise = rng.integers(0, 2, (2, count)) != 0
        flags = {"valid": valid, "first": np.where(valid, place == rows[0], noise[0]),
                 "last": np.where(valid, end, noise[1]), "truncate": np.full(count, truncate),
                 "limit_shift": np.full(count, shift), "o_valid": end, "o_nonfinite": end & (not finite),
                 "o_exceeds": end & exceeds}  # fmt: skip
        for name, values in flags.items():
            columns.setdefault(name, []).append(values.astype(np.uint8))
        sums += [0] * (count - 1) + [exact if finite else 0]
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    expected = {"o": words_from_integers(sums, QK_BITS)}
    return {k: v for k, v in joined.items() if not k.startswith("o_")}, expected | {
        k: v for k, v in joined.items() if k.startswith("o_")
    }


def _operands(rng: np.random.Generator, beats: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """fp16 pairs: any finite ones; around the range rule's limits; all large; some infinite or NaN; opposite pairs."""
    size = beats * LANES
    kind = rng.choice(7, p=[0.05, 0.4, 0.1, 0.1, 0.05, 0.15, 0.15])
    a, b = rng.integers(0, 1 << 16, (2, size), dtype=np.uint16)
    if kind == 0:  # sums of the largest magnitude, of one sign
        a, b = a & 0x83FF | 0x7800, b & 0x03FF | 0x7800
        b |= a & 0x8000 if rng.integers(2) else ~a & 0x8000
    elif kind in (1, 2):  # products of 2^10 to 2^30, above and below the limits
        power = rng.integers(10, 31, size)
        first = rng.integers((power - 15).clip(min=0), power.clip(max=15) + 1)
        a = a & 0x83FF | (15 + first).clip(1, 30).astype(np.uint16) << 10
        b = b & 0x83FF | (15 + power - first).clip(1, 30).astype(np.uint16) << 10
        same = rng.integers(0, 2, size) == 0
        a, b = np.where(same, a & 0xFC00, a), np.where(same, b & 0xFC00, b)
        if kind == 1:  # only one of them may pass a limit
            a[rng.permutation(size)[1:]] &= 0x87FF
    elif kind == 3:  # sums that cancel
        half = size // 2
        a[half : 2 * half], b[half : 2 * half] = a[:half] ^ 0x8000, b[:half]
    for values in (a, b):
        special = values & 0x7C00 == 0x7C00
        values[special] &= 0xBFFF
    if kind == 4:
        (a if rng.integers(2) else b)[rng.integers(size)] = rng.choice([0x7C00, 0xFC00, 0x7E00, 0xFC01])
    return a.astype(np.uint16).view(np.float16), b.astype(np.uint16).view(np.float16)


TARGET = Target(ObservedMac, vectors, part="mac")
