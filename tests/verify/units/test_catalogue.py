from pathlib import Path

import pytest

from nearflash.verify import units
from nearflash.verify.units.catalogue import PARTS, choose_proofs, choose_targets, proofs, targets


def test_unknown_proof():
    with pytest.raises(ValueError, match=r"proof must be one of .*, stream\.skid, .*, not 'stream\.nothing'"):
        choose_proofs(["stream.nothing"])


def test_unknown_unit():
    with pytest.raises(ValueError, match=r"unit must be one of .*attention\.numerics\.mac.*, not 'no\.such'"):
        choose_targets(["no.such"])


def test_choice():
    assert list(choose_proofs(["stream.queue.block", "bus.read"])) == ["stream.queue.block", "bus.read"]
    assert choose_targets() == targets()


def test_names_are_paths_in_the_gateware():
    """Of a proof with variants, the last word is the variant."""
    root = Path(__file__).resolve().parents[3]
    for name in {*proofs(), *targets()}:
        paths = (root / "rtl/nearflash/gateware" / part.replace(".", "/") for part in (name, name.rpartition(".")[0]))
        assert any(path.with_suffix(".py").exists() for path in paths), name


def test_every_unit_is_found():
    """Each file has a proof or a target, or is a part of a folder's that has."""
    found, root = {*proofs(), *targets()}, Path(units.__path__[0])
    for path in root.rglob("*.py"):
        *folders, name = path.relative_to(root).with_suffix("").parts
        if name in ("__init__", "catalogue", "groups", "reference"):
            continue
        unit = ".".join(folders if name in PARTS else (*folders, name))
        assert any(f"{known}.".startswith(f"{unit}.") for known in found), unit
