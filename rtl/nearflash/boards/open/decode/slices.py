"""The BELs of a SLICEL or SLICEM from its features: LUTs, memories of LUTs, carry chains, wide multiplexers, registers.

Source: AMD UG474, 7 Series FPGAs configurable logic block (slices, distributed RAM, shift registers, carry logic).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from nearflash.abi.errors import FormatError
from nearflash.boards.open.decode.cells import Cell, make_lut

__all__ = ["Slice"]

_LETTERS = "ABCD"
_REGISTER = re.compile(r"([ABCD]5?FF)(?:MUX)?\.")
_HALF = (1 << 32) - 1


@dataclass(frozen=True)
class Slice:
    """A slice: `place` is its key without a BEL, `features` those without its name, `net` that of a site pin."""

    place: str
    features: frozenset[str]
    net: Callable[[str], str]

    def list_roots(self) -> set[str]:
        """Keys of registers, from which everything else is reached."""
        return {self._key(match[1]) for name in self.features if (match := _REGISTER.match(name))}

    def output(self, pin: str) -> str:
        """The net at an output pin."""
        if pin == "COUT":
            return self._key("CO3")
        letter = pin[0]
        if pin.endswith("MUX"):
            return self._pick(f"{letter}OUTMUX")
        return self._key(f"{letter}FF" if pin.endswith("Q") else f"{letter}6LUT")

    def read(self, bel: str) -> Cell:
        """The cell of a BEL. Raises FormatError for features that make none."""
        if bel.endswith("LUT"):
            is_memory = {f"{bel[0]}LUT.RAM", f"{bel[0]}LUT.SRL"} & self.features
            return self._memory(bel[0], bel[1]) if is_memory else self._lut(bel[0], bel[1])
        if bel.endswith("FF"):
            return self._register(bel)
        if bel.endswith("MUX"):
            return self._wide(bel)
        return self._carry(bel)

    def _key(self, bel: str) -> str:
        return f"{self.place}.{bel}"

    def _init(self, letter: str) -> int:
        start = f"{letter}LUT.INIT["
        return sum(1 << int(name[len(start) : -1]) for name in self.features if name.startswith(start))

    def _lut(self, letter: str, size: str) -> Cell:
        table, inputs = self._init(letter), int(size)
        nets = [self.net(f"{letter}{place}") for place in range(1, inputs + 1)]
        return make_lut(table if inputs == 6 else table & _HALF, nets)

    def _memory(self, letter: str, size: str) -> Cell:
        """A RAM or a shift register of one LUT, or of half a one (SMALL)."""
        init, small, is_shift = (
            self._init(letter),
            f"{letter}LUT.SMALL" in self.features,
            f"{letter}LUT.SRL" in self.features,
        )
        if small:
            init = init >> 32 if size == "6" else init & _HALF
        elif size == "5":
            raise FormatError(f"{self.place}.{letter}5LUT must be no output of a memory of a whole LUT")
        if is_shift:  # each bit of the register is two of the LUT
            if any((init >> bit & 1) != (init >> (bit + 1) & 1) for bit in range(0, 64, 2)):
                raise FormatError(f"{self.place}.{letter}LUT must have pairs of equal bits as a shift register")
            init = sum((init >> (2 * bit) & 1) << bit for bit in range(32))
        pins = range(2 if is_shift else 1, 6 if small else 7)
        inputs = {f"R{place}": self.net(f"{letter}{pin}") for place, pin in enumerate(pins)}
        if not is_shift:
            inputs |= {f"W{place}": self.net(f"D{pin}") for place, pin in enumerate(pins)}
        inputs["D"] = self.net(f"{letter}X") if small and size == "6" else self._data(letter)
        inputs |= {"WE": self.net("CE" if "WEMUX.CE" in self.features else "WE"), "CK": self._clock()}
        if {"WA7USED", "WA8USED"} & self.features:
            raise FormatError(f"{self.place} must be no memory of several LUTs, which nothing here reads")
        return Cell("SRL" if is_shift else "RAM", {"init": init, "bits": len(pins)}, inputs)

    def _data(self, letter: str) -> str:
        """The first data input of a memory: its own pin, or what the memory above it has."""
        if letter == "D":
            return self.net("DI")
        if f"{letter}LUT.DI1MUX.{letter}I" in self.features:
            return self.net(f"{letter}I")
        above = "B" if letter == "A" else "D"
        if f"{letter}LUT.SRL" in self.features and f"{letter}LUT.SMALL" not in self.features:
            raise FormatError(f"{self.place}.{letter}LUT must have its own data, not the end of another shift register")
        return self._data(above)

    def _clock(self) -> str:
        if {"CLKINV", "LATCH"} & self.features:
            raise FormatError(f"{self.place} must have registers of the rising edge, not CLKINV or LATCH")
        return self.net("CLK")

    def _register(self, bel: str) -> Cell:
        letter, name = bel[0], bel
        if bel[1] == "5":
            source = {f"{name}MUX.IN_A", f"{name}MUX.IN_B"} & self.features
            if len(source) != 1:
                raise FormatError(f"{self.place}.{name}MUX must have one input, not {len(source)}")
            data = self.net(f"{letter}X") if f"{name}MUX.IN_B" in source else self._key(f"{letter}5LUT")
        else:
            data = self._pick(f"{letter}FFMUX")
        config = {"init": int(f"{name}.ZINI" not in self.features), "set": int(f"{name}.ZRST" not in self.features),
                  "sync": int("FFSYNC" in self.features)}  # fmt: skip
        return Cell("FF", config, {
            "D": data, "CK": self._clock(), "CE": self.net("CE") if "CEUSEDMUX" in self.features else "1",
            "SR": self.net("SR") if "SRUSEDMUX" in self.features else "0",
        })  # fmt: skip

    def _pick(self, multiplexer: str) -> str:
        """The net that an inner multiplexer hands on."""
        letter = multiplexer[0]
        names = [name.rpartition(".")[2] for name in self.features if name.startswith(f"{multiplexer}.")]
        if len(names) != 1:
            raise FormatError(f"{self.place}.{multiplexer} must have one input, not {len(names)}")
        name, place = names[0], _LETTERS.index(letter)
        if name == f"{letter}X":
            return self.net(name)
        seven = "F7AMUX" if letter == "A" else "F7BMUX"
        bels = {"O5": f"{letter}5LUT", "O6": f"{letter}6LUT", "XOR": f"O{place}", "CY": f"CO{place}", "F7": seven,
                "F8": "F8MUX", f"{letter}5Q": f"{letter}5FF"}  # fmt: skip
        return self._key(bels[name])

    def _wide(self, bel: str) -> Cell:
        low, high, select = {"F7AMUX": ("B6LUT", "A6LUT", "AX"), "F7BMUX": ("D6LUT", "C6LUT", "CX"),
                             "F8MUX": ("F7BMUX", "F7AMUX", "BX")}[bel]  # fmt: skip
        return Cell("MUX", {}, {"I0": self._key(low), "I1": self._key(high), "S": self.net(select)})

    def _carry(self, bel: str) -> Cell:
        """One bit of a carry chain: its sum (O) or its carry (CO)."""
        place, letter = int(bel[-1]), _LETTERS[int(bel[-1])]
        inputs = {"S": self._key(f"{letter}6LUT"), "CI": self._key(f"CO{place - 1}") if place else self._carry_in()}
        if bel.startswith("CO"):
            own = f"CARRY4.{letter}CY0" in self.features
            inputs["DI"] = self._key(f"{letter}5LUT") if own else self.net(f"{letter}X")
        return Cell("CARRY" if bel.startswith("CO") else "SUM", {}, inputs)

    def _carry_in(self) -> str:
        names = [name for name in ("CIN", "AX", "C1", "C0") if f"PRECYINIT.{name}" in self.features]
        if len(names) > 1:
            raise FormatError(f"{self.place}.PRECYINIT must have one input, not {len(names)}")
        return self.net(names[0]) if names and names[0] in ("CIN", "AX") else str(int(names == ["C1"]))
