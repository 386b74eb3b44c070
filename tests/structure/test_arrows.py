"""Which package may import which: the table of the design, enforced."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

#: First-party packages that a package may import, beside itself. Arrows point down only: a row names rows above it.
MAY_IMPORT = {
    "abi": set(),
    "support": set(),
    "arguments": set(),
    "process": set(),
    "model": {"abi"},
    "device": {"abi", "support"},
    "storage": {"abi", "support", "device"},
    "weights": {"abi", "support", "device", "storage"},
    "identity": {"abi", "support", "storage"},
    "pretrained": {"abi", "support", "weights"},
    "planning": {"abi", "support"},
    "explore": {"abi", "support", "planning"},
    "training": {"abi", "support", "arguments", "device", "storage"},
    "inference": {"abi", "support", "arguments", "device", "identity", "pretrained", "storage"},
    "offload": {
        "abi",
        "support",
        "arguments",
        "process",
        "device",
        "storage",
        "weights",
        "identity",
        "pretrained",
        "planning",
        "inference",
    },
    "gateware": {"abi"},
    "boards": {"abi", "support", "device", "gateware"},
    "sim": {"abi", "support", "model", "gateware", "device", "boards"},
    "verify": {"abi", "support", "model", "gateware", "device", "boards", "sim"},
    "bench": {
        "abi",
        "support",
        "process",
        "device",
        "storage",
        "training",
        "inference",
        "weights",
        "pretrained",
        "planning",
        "explore",
        "offload",
    },
    "sim.bench": {"abi", "support", "model", "gateware", "device", "explore", "inference", "sim", "verify", "bench"},
    "demo": {"abi", "support", "arguments", "device", "storage", "training", "bench"},
    "cli": {
        "abi",
        "support",
        "arguments",
        "device",
        "storage",
        "weights",
        "pretrained",
        "planning",
        "explore",
        "training",
        "offload",
        "bench",
    },
}
#: Parts of a package that may import more.
MORE = {
    part: {"model"}
    for part in ("device.backends.model", "device.selftest.attend", "device.selftest.expand", "demo.audit")
} | {"training.finetune": {"pretrained", "weights"}}
#: Third-party packages of those that stay lean; the others may use what pyproject.toml declares.
LEAN = {
    "abi": set(),
    "support": set(),
    "model": {"numpy"},
    "device": {"numpy"},
    "weights": {"numpy", "crc32c", "torch", "transformers", "accelerate", "triton"},
    "storage": {"numpy", "crc32c"},
    "explore": {"numpy", "matplotlib"},
    "bench.runner": set(),
    "cli": set(),
    "gateware": {"amaranth"},
    "boards": {"amaranth"},
}
#: Imported in a function, only when it is called and where it is installed.
LAZY = {
    "nearflash.device.backends.host.topk": {"crc32c"},
    "nearflash.device.backends.pynq.device": {"pynq"},
}
#: Loaded by a device that needs them, which says so where they are missing.
FOR_ONE_DEVICE = {
    f"nearflash.device.backends.host.vector.{name}": {"numba", "llvmlite"}
    for name in ("checksum", "chunks", "compiled")
}

#: Packages of gateware that a package of gateware may import, beside itself. A row names rows above it, so there are no
#: circles; the NAND controller and the formats know nothing of attention.
GATEWARE_MAY_IMPORT = {
    "stream": set(),
    "fp": set(),
    "bus": {"stream"},
    "coding": {"fp"},
    "nand": {"stream", "fp", "bus", "coding"},
    "attention.numerics": {"fp"},
    "attention.engine": {"stream", "fp", "nand", "attention.numerics"},
    "attention.select": {"stream", "fp", "attention.numerics", "attention.engine"},
    "attention.control": {"stream", "fp", "bus", "nand", "attention.numerics", "attention.engine"},
    "gradients": {"stream", "fp", "coding"},
    "weights": {"stream", "fp", "bus", "coding"},
    "update": {"stream", "fp", "bus", "gradients"},
    "top": {"stream", "bus", "nand", "attention.select", "attention.control", "weights", "update"},
}


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names imported anywhere in a module, in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrow"
            if node.module == "nearflash":
                yield from (f"nearflash.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def _row(module: str) -> str:
    """The row of MAY_IMPORT that a module belongs to: the longest."""
    rows = [row for row in MAY_IMPORT if f"{module}.".startswith(f"{row}.")]
    assert rows, f"{module} needs a row in MAY_IMPORT"
    return max(rows, key=len)


def test_first_party_arrows(modules):
    wrong = []
    for name, tree in modules.items():
        module = name.removeprefix("nearflash.")
        package = _row(module)
        more = (names for part, names in MORE.items() if f"{module}.".startswith(f"{part}."))
        allowed = MAY_IMPORT[package].union(*more) | {package.split(".")[0]}
        for target in imports(tree):
            top, _, rest = target.partition(".")
            if top == "nearflash" and rest.split(".")[0] not in allowed:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def _gateware_package(target: str) -> str | None:
    """The row of GATEWARE_MAY_IMPORT that a module belongs to, "" for gateware without a row, None elsewhere."""
    root = "nearflash.gateware."
    if not target.startswith(root):
        return None
    rows = (row for row in GATEWARE_MAY_IMPORT if f"{target}.".startswith(f"{root}{row}."))
    return next(rows, "")


def test_gateware_arrows(modules):
    arrows: dict[tuple[str, str], list[str]] = {}
    for name, tree in modules.items():
        package = _gateware_package(name)
        if package is None or name == "nearflash.gateware.attention":
            continue
        assert package, f"{name} needs a row in GATEWARE_MAY_IMPORT"
        for target in imports(tree):
            other = _gateware_package(target)
            if other is not None and other != package:
                arrows.setdefault((package, other), []).append(f"{name} imports {target}")
    allowed = {(package, other) for package, row in GATEWARE_MAY_IMPORT.items() for other in row}
    assert not [line for arrow, lines in arrows.items() if arrow not in allowed for line in lines]
    assert not allowed - arrows.keys(), "arrows that nothing needs"


def test_gateware_rows_name_rows_above():
    rows = list(GATEWARE_MAY_IMPORT)
    for at, package in enumerate(rows):
        assert GATEWARE_MAY_IMPORT[package] <= set(rows[:at]), package
    assert len(rows) <= 13
    assert sum(map(len, GATEWARE_MAY_IMPORT.values())) <= 43


def test_lean_packages_name_no_other_third_party(modules):
    wrong = []
    for name, tree in modules.items():
        module = name.removeprefix("nearflash.")
        lean = [names for part, names in LEAN.items() if f"{module}.".startswith(f"{part}.")]
        if not lean:
            continue
        allowed = (
            lean[0]
            | LAZY.get(name, set())
            | FOR_ONE_DEVICE.get(name, set())
            | set(sys.stdlib_module_names)
            | {"nearflash"}
        )
        wrong += [f"{name} imports {target}" for target in imports(tree) if target.split(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import nearflash.abi.commands, nearflash.abi.emit", ["numpy", "torch", "amaranth"]),
        (
            "import nearflash.device, nearflash.device.backends.host.update, nearflash.device.replay",
            ["torch", "amaranth"],
        ),
        ("import nearflash.device", ["numba"]),
        ("from nearflash.device import available_devices; available_devices()", ["torch", "amaranth", "nearflash.sim"]),
        ("import nearflash.cli.main", ["torch", "amaranth", "numpy"]),
        ("import nearflash.training.cli", ["torch", "numpy"]),
    ],
)
def test_imports_stay_lean(statement, absent):
    script = f"import sys\n{statement}\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
