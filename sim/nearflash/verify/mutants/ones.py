"""Vectors of the counter of ones: sections of all lengths, words of padding behind them, of any contents."""

from typing import Any

import numpy as np
from amaranth.hdl import Module, Mux
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.gateware.weights.popcount import Counted, OnesCounter
from nearflash.sim.verilator.ports import words_from_integers

__all__ = ["ObservedCount", "vectors"]

_PORT_BITS, _BITS_MAX = 128, 1024
_SECTIONS = 400
_FIELD_BITS = {Counted.ONES: 1, Counted.THREES_OF_4: 4, Counted.THREES_OF_2: 2}


class ObservedCount(wiring.Component):
    """OnesCounter as `inner`; its outputs are zero where they are not looked at."""

    LATENCY = 0

    def __init__(self) -> None:
        self.inner = OnesCounter(_PORT_BITS, _BITS_MAX)
        members = dict(self.inner.signature.members.items())
        outputs = {name: Out(members.pop(name).shape) for name in ("count", "beyond")}
        super().__init__({**members, "look": In(1), **outputs})

    def elaborate(self, platform: Any) -> Module:
        """Build it with the gates."""
        m = Module()
        m.submodules.inner = inner = self.inner
        for name in ("begin", "bits", "counted", "enable", "word"):
            m.d.comb += getattr(inner, name).eq(getattr(self, name))
        for name in ("count", "beyond"):
            m.d.comb += getattr(self, name).eq(Mux(self.look, getattr(inner, name), 0))
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """A row a cycle. What is not looked at (lengths, words without `enable`) is anything."""
    columns: dict[str, list[Any]] = {name: [] for name in ("begin", "bits", "counted", "enable", "look")}
    words, counts, latency = list[int](), list[tuple[int, int]](), OnesCounter.latency(_PORT_BITS)
    looked = (0, 0)

    def row(begin: int = 0, bits: int | None = None, word: int | None = None, look: int = 0) -> None:
        length = int(rng.integers(_BITS_MAX + 1)) if bits is None else bits
        for name, value in zip(columns, (begin, length, counted, word is not None, look), strict=True):
            columns[name].append(int(value))
        words.append(int.from_bytes(rng.bytes(_PORT_BITS // 8), "little") if word is None else word)
        counts.append(looked if look else (0, 0))

    counted = Counted.ONES
    for _ in range(latency):
        row()
    for _ in range(_SECTIONS):
        rests = int(rng.integers(3))
        begins_at_once, counted = rests == 0 and len(counts) > latency, Counted(int(rng.integers(3)))
        field = _FIELD_BITS[counted]
        size = int(rng.choice([0, 1, 2, 7, 16, 17, 31, 100, _BITS_MAX // field])) * field
        size = min(size if rng.integers(2) else int(rng.integers(_BITS_MAX // field + 1)) * field, _BITS_MAX)
        row(begin=1, bits=size, look=int(begins_at_once))
        every = rng.random(-(-size // 512) * 512 + int(rng.integers(2)) * _PORT_BITS) < rng.choice([0.1, 0.5, 1])
        if rng.integers(2):
            every[size:] = 0
            if len(every) > size and rng.integers(2):
                every[int(rng.integers(size, len(every)))] = 1
        text = np.packbits(every, bitorder="little").tobytes()
        for at in range(0, len(text), _PORT_BITS // 8):
            for _ in range(int(rng.integers(6)) // 4):
                row()
            row(word=int.from_bytes(text[at : at + _PORT_BITS // 8], "little"))
        lowest = every[:size].reshape(-1, field)[:, :2].all(axis=1)
        for _ in range(latency - 1):
            row()
        looked = int(lowest.sum()), int(every[size:].any())
        for _ in range(rests):
            row(look=1)
    inputs: dict[str, NDArray[Any]] = {name: np.array(values, np.uint16) for name, values in columns.items()}
    found = np.array(counts)
    return inputs | {"word": words_from_integers(words, _PORT_BITS)}, {"count": found[:, 0], "beyond": found[:, 1]}
