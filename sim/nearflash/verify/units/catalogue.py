"""Every proof and mutation target by the name of its unit, found in this package's modules."""

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

from nearflash.abi.errors import ConfigError
from nearflash.verify import units
from nearflash.verify.mutants.target import Target
from nearflash.verify.proofs.proof import Proof

__all__ = ["PARTS", "choose_proofs", "choose_targets", "proofs", "targets"]

#: Modules of a unit that is a folder; they carry the folder's name.
PARTS = ("proof", "vectors")

_Item = TypeVar("_Item")


@functools.cache
def proofs() -> Mapping[str, Proof]:
    """All proofs by name: the unit's, with the variant's where a unit has several."""
    known: dict[str, Proof] = {}
    for unit, module in _modules():
        if hasattr(module, "PROOF"):
            known[unit] = module.PROOF
        known |= {f"{unit}.{variant}": proof for variant, proof in getattr(module, "PROOFS", {}).items()}
    return known


@functools.cache
def targets() -> Mapping[str, Target]:
    """All mutation targets by the unit's name."""
    return {unit: module.TARGET for unit, module in _modules() if hasattr(module, "TARGET")}


def choose_proofs(names: Iterable[str] | None = None) -> dict[str, Proof]:
    """The proofs of these names (None: all). Raises ConfigError for a name that is no proof."""
    return _choose(proofs(), names, "proof")


def choose_targets(names: Iterable[str] | None = None) -> dict[str, Target]:
    """The mutation targets of these names (None: all). Raises ConfigError for a name that is no target."""
    return _choose(targets(), names, "unit")


def _modules() -> Iterator[tuple[str, Any]]:
    for info in sorted(pkgutil.walk_packages(units.__path__, f"{units.__name__}."), key=lambda info: info.name):
        if info.ispkg or info.name == __name__:
            continue
        unit = info.name.removeprefix(f"{units.__name__}.")
        folder, _, part = unit.rpartition(".")
        module: ModuleType = importlib.import_module(info.name)
        yield folder if part in PARTS else unit, module


def _choose(known: Mapping[str, _Item], names: Iterable[str] | None, what: str) -> dict[str, _Item]:
    chosen = list(known) if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise ConfigError(f"{what} must be one of {', '.join(known)}, not {name!r}")
    return {name: known[name] for name in chosen}
