"""Masks of the lowest n bits, written as one shift.

Gateware writes such a mask as one comparison of n with a constant for each bit. That is short in logic and long in
software: five operations a bit, in each of the many rounders.
"""

import re

__all__ = ["shift_masks"]

_BITS_MIN = 4
"""Of a mask for which a shift is shorter."""

_NAME = r"(?:\\\S+ |\b[A-Za-z_]\w*)"
_MODULE = re.compile(r"^module .*?^endmodule\n", re.MULTILINE | re.DOTALL)
_COMPARISON = re.compile(rf"^  assign ({_NAME}) *= ({_NAME}) *> \d+'h([0-9a-f]+);\n", re.MULTILINE)
_BITS = re.compile(rf"\{{ ({_NAME} *(?:, {_NAME} *)+)\}}")


def shift_masks(verilog: str) -> str:
    """The text with `~(ones << n)` for each `{ ..., n > 2, n > 1, n > 0 }`."""
    return _MODULE.sub(lambda module: _masks(module[0]), verilog)


def _masks(module: str) -> str:
    compared = {match[1].strip(): (match[2], int(match[3], 16)) for match in _COMPARISON.finditer(module)}

    def mask(bits: re.Match[str]) -> str:
        # The highest bit comes first.
        found = [compared.get(name.strip(), ("", -1)) for name in reversed(bits[1].split(" , "))]
        numbers = {number for number, _ in found}
        if len(numbers) > 1 or len(found) < _BITS_MIN or [limit for _, limit in found] != list(range(len(found))):
            return bits[0]
        return f"{{ ~ ({len(found)}'h{(1 << len(found)) - 1:x} << {numbers.pop()}) }}"

    return _BITS.sub(mask, module) if compared else module
