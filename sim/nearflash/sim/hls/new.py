"""Starts an optimizer of a user's own: the C++ struct, the Python definition, and a line that says what to do next."""

import os
import re
from pathlib import Path

from nearflash.abi.errors import CommandError
from nearflash.support.files import PUBLIC_MODE, read_text, write_durably

__all__ = ["new_rule"]

_HPP = """\
// {Name}: <what it is, and who wrote of it>.
#pragma once

#include "nearflash/optimizer.hpp"

namespace nearflash {{

template <typename F>
struct {Name} {{
    struct Scalars {{
        F lr, momentum;  // the same for all parameters of a step
    }};
    struct State {{
        F p, m;  // p, and the arrays beside it
    }};

    // One parameter's step. Each operation is rounded on its own; write F(1) for a constant.
    static State step(State s, F g, Scalars c) {{
        const F m = c.momentum * s.m + g;
        return {{s.p - c.lr * m, m}};
    }}
}};

NEARFLASH_OPTIMIZER({Name});

}}  // namespace nearflash
"""
_PY = '''\
"""{Name}: <what it is, and who wrote of it>."""

from dataclasses import dataclass

from nearflash.sim.hls.rule import HlsRule


@dataclass(frozen=True, kw_only=True)
class {Name}(HlsRule):
    """Hyper-parameters of one step; names of arrays and scalars are those of {name}.hpp."""

    momentum: float = 0.9

    ARRAYS = ("m",)

    def scalars(self):
        return {{"lr": self.lr, "momentum": self.momentum}}

    @staticmethod
    def update(c, g, p, m):
        m = c.momentum * m + g
        return p - c.lr * m, m
'''
_README = """\
{name}: `nearflash hls check {name}.hpp` compares C++ and Python, `nearflash hls analyze {name}.hpp` estimates its rate.
"""


def new_rule(name: str, folder: Path) -> list[Path]:
    """Write <name>.hpp and <name>.py (momentum, to be changed) and a line of README.md into `folder`, made if missing.

    Raises CommandError for a name that is none in C++ and Python, and where a file exists already.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise CommandError(f"name must be lower-case letters and digits, a letter first, not {name!r}")
    files = {folder / f"{name}.hpp": _HPP, folder / f"{name}.py": _PY}
    for path in files:
        if os.path.lexists(path):
            raise CommandError(f"{path} must not exist yet; give another name or folder")
    folder.mkdir(parents=True, exist_ok=True)
    readme = folder / "README.md"
    notes = read_text(readme) if readme.exists() else ""
    try:
        for path, text in files.items():
            write_durably(path, text.format(name=name, Name=name.capitalize()), keep_existing=True, mode=PUBLIC_MODE)
    except FileExistsError as error:
        raise CommandError(f"{error.filename} must not exist yet; give another name or folder") from error
    write_durably(readme, notes + _README.format(name=name), mode=PUBLIC_MODE)
    return [*files, readme]
