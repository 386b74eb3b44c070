"""Next values of registers, computed at the clock edge alone.

Amaranth writes a register as two blocks: a combinational one that sets the next value, and a clocked one that takes
it. Verilator then computes the next value whenever one of its inputs changes, the reset of every register among them,
stores it and copies it. Here both become one clocked block, and a branch that is not taken costs nothing.
"""

import re
from collections import Counter

__all__ = ["clock_registers"]

_NAME = r"\\\S+ |(?<![\w'\\$])[A-Za-z_]\w*"
_IDENTIFIER = re.compile(_NAME)
_MODULE = re.compile(r"^module .*?^endmodule\n", re.MULTILINE | re.DOTALL)
_NEXT = re.compile(
    # Yosys writes the `if`, for a block that nothing would trigger at time 0.
    r"^  always @\* begin\n(?:    if \(\\\$auto\$verilog_backend\S+ \) begin end\n)?(.*?)^  end\n",
    re.MULTILINE | re.DOTALL,
)
_REGISTER = re.compile(rf"^  always @\((posedge (?:{_NAME}))\)\n    ({_NAME}) <= ({_NAME});\n", re.MULTILINE)
_ASSIGNMENT = re.compile(rf"^( *)({_NAME})( *\[[^\]]*\])?( *)= (.*);\n", re.MULTILINE)


def clock_registers(verilog: str) -> str:
    """The text with one clocked block for each register whose next value nothing else reads."""
    return _MODULE.sub(lambda module: _Module(module[0]).text(), verilog)


class _Module:
    def __init__(self, verilog: str) -> None:
        self._verilog = verilog
        self._registers = {match[3].strip(): match for match in _REGISTER.finditer(verilog)}  # by next value
        self._uses = Counter(name.strip() for name in _IDENTIFIER.findall(verilog))
        self._merged: set[str] = set()

    def text(self) -> str:
        text = _NEXT.sub(self._clock, self._verilog)
        return _REGISTER.sub(lambda match: "" if match[3].strip() in self._merged else match[0], text)

    def _clock(self, block: re.Match[str]) -> str:
        targets = [match[2].strip() for match in _ASSIGNMENT.finditer(block[1])]
        register = self._registers.get(targets[0]) if targets else None
        statements = len(re.findall(r"[^/];$", block[1], re.MULTILINE))  # not `/* empty */;`
        if register is None or len(set(targets)) > 1 or statements != len(targets):
            return block[0]
        # The other two uses are the declaration and the clocked block.
        if self._uses[targets[0]] != len(targets) + 2:
            return block[0]
        self._merged.add(targets[0])
        edge, name = register[1], register[2]
        body = _ASSIGNMENT.sub(lambda match: f"{match[1]}{name}{match[3] or ''} <= {match[5]};\n", block[1])
        body = body.removeprefix(f"    {name} <= {name};\n")  # a register keeps its value by itself
        return f"  always @({edge}) begin\n{body}  end\n"
