"""One module for all equal ones of a design: channels and lanes are read, checked and converted once.

Amaranth gives every component a module of its own, named by its path, and names the ports that it adds by numbers of
the whole design. Here those ports are numbered within their module, from the innermost modules outwards; then equal
modules have equal texts.
"""

import re

__all__ = ["share_modules"]

_MODULE = re.compile(r"^module \\(\S+)\n(.*?)^end\n", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"^  cell \\(\S+) (.*?)^  end\n", re.MULTILINE | re.DOTALL)
_CONNECT = re.compile(r"^    connect \\(\S+) ", re.MULTILINE)
_NUMBERED = re.compile(r"\\(port\$\d+\$\d+)")
_MARK = "\0"  # keeps the port names of a cell's module from being taken for the module's own


def share_modules(rtlil: str) -> tuple[str, dict[str, str]]:
    """The text with only the first of equal modules; and for every module the one that stands for it."""
    return _Sharing(rtlil).result()


class _Sharing:
    def __init__(self, rtlil: str) -> None:
        self._text = rtlil
        self._modules = {match[1]: match for match in _MODULE.finditer(rtlil)}
        self._bodies: dict[str, str] = {}  # by module, rewritten
        self._ports: dict[str, dict[str, str]] = {}  # by module: old name -> new one
        self._chosen: dict[str, str] = {}
        self._first: dict[str, str] = {}  # by body

    def result(self) -> tuple[str, dict[str, str]]:
        parts, place = [], 0
        for name, match in self._modules.items():
            if self._stands_for(name) == name:
                parts += [self._text[place : match.start()], f"module \\{name}\n{self._bodies[name]}end\n"]
            place = match.end()
        return "".join(parts) + self._text[place:], self._chosen

    def _stands_for(self, name: str) -> str:
        if name not in self._chosen:
            ports = self._ports[name] = {}
            body = _CELL.sub(self._cell, self._modules[name][2])
            body = _NUMBERED.sub(lambda port: "\\" + ports.setdefault(port[1], f"port${len(ports)}"), body)
            self._bodies[name] = body.replace(_MARK, "")
            self._chosen[name] = self._first.setdefault(self._bodies[name], name)
        return self._chosen[name]

    def _cell(self, cell: re.Match[str]) -> str:
        kind = cell[1]
        if kind not in self._modules:
            return cell[0]
        chosen, ports = self._stands_for(kind), self._ports[kind]
        inner = _CONNECT.sub(lambda port: f"    connect \\{_MARK}{ports.get(port[1], port[1])} ", cell[2])
        return f"  cell \\{chosen} {inner}  end\n"
