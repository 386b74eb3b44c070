"""Which package may import which: the table of the design, enforced."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

#: First-party packages that a package may import, beside itself. Arrows point down only: a row names rows above it.
MAY_IMPORT = {
    "abi": set(),
    "support": {"abi"},
    "model": {"abi"},
    "device": {"abi", "support"},
    "storage": {"abi", "support", "device"},
    "serving": {"abi", "storage"},
    "weights": {"abi", "support", "device", "storage"},
    "identity": {"abi", "support", "storage"},
    "planning": {"abi", "support"},
    "explore": {"abi", "support", "planning"},
    "training": {"abi", "support", "device", "storage"},
    "inference": {"abi", "support", "device", "identity", "storage", "weights"},
    "offload": {"abi", "support", "device", "storage", "weights", "identity", "planning", "inference"},
    "gateware": {"abi"},
    "boards": {"abi", "support", "device", "gateware"},
    "sim": {"abi", "support", "model", "gateware", "device", "boards"},
    "bench": {
        "abi",
        "support",
        "device",
        "storage",
        "training",
        "inference",
        "weights",
        "planning",
        "explore",
        "offload",
    },
    "verify": {"abi", "support", "model", "gateware", "device", "boards", "sim"},
    "verify.bench": {"abi", "support", "model", "gateware", "device", "explore", "inference", "sim", "verify", "bench"},
    "verify.fixtures.ssd_events": {"explore"},
    "demo": {"abi", "support", "device", "storage", "weights", "training", "bench"},
    "cli": {"abi", "support", "device", "storage", "weights", "planning", "explore", "training", "offload", "bench"},
}
#: Folders of a package, "" for its own files: each imports those before it alone, so there are no circles.
FOLDERS = {
    "abi": ["", "optimizers", "kernel", "attention", "emit"],
    "bench": ["", "offload", "inference", "storage", "storage.fuzz", "training", "weights"],
    "device": [
        *("", "bitstreams", "backends", "drivers", "backends.host.vector", "backends.host", "backends.model"),
        *("backends.pynq", "backends.zynq", "backends.xrt", "selftest"),
    ],
    "explore": ["", "systems", "studies"],
    "inference": [
        *("policy", "sparse", "engines", "engines.paged", "engines.device", "engines.cpu", "engines.gpu", "cache", ""),
        *("calibration", "commands", "examples"),
    ],
    "model": [
        *("", "fp", "coding", "gradients", "weights", "update", "nand.bch", "nand", "attention.numerics"),
        *("attention.select", "attention.memory", "attention.control", "attention"),
    ],
    "offload": ["tiers", "weights", "weights.experts", "cache", "schedule", "", "machine", "commands"],
    "storage": ["io", "flash", "blocks", "kv", "state", ""],
    "training": [
        *("checks", "gradients", "gradients.compression", "step", "optimizers", "", "integrations", "examples"),
    ],
    "boards": ["design", "zynq7", "open.nextpnr", "open", "vendor", ""],
    "sim": ["", "pysim", "hls", "nand", "verilator", "trace"],
    "verify": [
        *("fixtures", "fixtures.boards", "mutants", "proofs", "cocotb", "cocotb.bus", "cocotb.stream", "cocotb.top"),
        *("units", "vendor", "", "bench"),
    ],
}
#: Parts of a package that may import more.
MORE = {
    part: {"model"}
    for part in (
        *("device.backends.model", "device.selftest.attend", "device.selftest.clock", "device.selftest.expand"),
        "demo.audit",
        "inference.engines.device.window",  # what the kernel will choose must be known to the bit
    )
} | {"training.finetune": {"weights"}, "verify.fixtures.boards.process": {"cli"}}
#: Third-party packages of those that stay lean; the others may use what pyproject.toml declares.
LEAN = {
    "abi": set(),
    "support": set(),
    "model": {"numpy"},
    "device": {"numpy"},
    "weights": {"numpy", "crc32c", "torch", "transformers", "accelerate", "safetensors", "triton"},
    "storage": {"numpy", "crc32c"},
    "serving": {"numpy", "torch", "vllm", "sglang", "lmcache"},
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


def imports(own: list[ast.AST]) -> Iterator[str]:
    """Dotted names imported anywhere in a module, of its nodes, in functions too."""
    for node in own:
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


def test_first_party_arrows(nodes):
    wrong = []
    for name, own in nodes.items():
        module = name.removeprefix("nearflash.")
        package = _row(module)
        more = (names for part, names in MORE.items() if f"{module}.".startswith(f"{part}."))
        allowed = MAY_IMPORT[package].union(*more) | {package.split(".")[0]}
        for target in imports(own):
            top, _, rest = target.partition(".")
            if top == "nearflash" and rest.split(".")[0] not in allowed:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def _row_of_folders(module: str, packages: set[str]) -> str:
    """The row of FOLDERS that a module belongs to: of its folder, or of the nearest folder around that has one."""
    package, _, folder = (module if module in packages else module.rpartition(".")[0]).partition(".")
    if package not in FOLDERS:
        return ""
    rows = [row for row in FOLDERS[package] if folder == row or (row and folder.startswith(f"{row}."))]
    assert rows, f"{module} needs a row in FOLDERS"
    return max(rows, key=len)


def _modules_imported(own: list[ast.AST], known: set[str]) -> Iterator[str]:
    """Our modules that a module imports: by name, or from their package."""
    for node in own:
        if isinstance(node, ast.ImportFrom):
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                found = name if name.removeprefix("nearflash.") in known else str(node.module)
                yield from {found.removeprefix("nearflash.")} & known
        elif isinstance(node, ast.Import):
            yield from {alias.name.removeprefix("nearflash.") for alias in node.names} & known


def test_folders_import_those_before_them(nodes):
    """A `__main__` belongs to no folder: it runs what its package exports."""
    known = {name.removeprefix("nearflash.") for name in nodes}
    packages = {name.rpartition(".")[0] for name in known}
    wrong = []
    for module in known:
        package = module.split(".")[0]
        if package == "gateware" or module.endswith("__main__"):
            continue
        row, order = _row_of_folders(module, packages), FOLDERS.get(package, [""])
        for other in _modules_imported(nodes[f"nearflash.{module}"], known):
            is_own = other.split(".")[0] == package
            if is_own and order.index(_row_of_folders(other, packages)) > order.index(row):
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_by_way_of_others(nodes):
    """Imports in functions and for types count: one reads such files together, or not at all."""
    known = {name.removeprefix("nearflash.") for name in nodes}
    arrows = {name: {*_modules_imported(nodes[f"nearflash.{name}"], known)} - {name} for name in known}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {', '.join(error.args[1])}")


def test_packages_import_those_before_them():
    rows = list(MAY_IMPORT)
    tops = {row: {row.split(".")[0]} for row in rows}
    for at, package in enumerate(rows):
        assert MAY_IMPORT[package] - tops[package] <= set(rows[:at]), package


def _gateware_package(target: str) -> str | None:
    """The row of GATEWARE_MAY_IMPORT that a module belongs to, "" for gateware without a row, None elsewhere."""
    root = "nearflash.gateware."
    if not target.startswith(root):
        return None
    rows = (row for row in GATEWARE_MAY_IMPORT if f"{target}.".startswith(f"{root}{row}."))
    return next(rows, "")


def test_gateware_arrows(nodes):
    arrows: dict[tuple[str, str], list[str]] = {}
    for name, own in nodes.items():
        package = _gateware_package(name)
        if package is None or name == "nearflash.gateware.attention":
            continue
        assert package, f"{name} needs a row in GATEWARE_MAY_IMPORT"
        for target in imports(own):
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


def test_lean_packages_name_no_other_third_party(nodes):
    wrong = []
    for name, own in nodes.items():
        module = name.removeprefix("nearflash.")
        lean = [names for part, names in LEAN.items() if f"{module}.".startswith(f"{part}.")]
        if not lean:
            continue
        allowed = lean[0] | LAZY.get(name, set()) | set(sys.stdlib_module_names) | {"nearflash"}
        wrong += [f"{name} imports {target}" for target in imports(own) if target.split(".")[0] not in allowed]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import nearflash.abi.kernel.commands, nearflash.abi.emit", ["numpy", "torch", "amaranth"]),
        (
            "import nearflash.device, nearflash.device.backends.host.update, nearflash.device.replay",
            ["torch", "amaranth"],
        ),
        ("from nearflash.device import available_devices; available_devices()", ["torch", "amaranth", "nearflash.sim"]),
        ("import nearflash.cli.main", ["torch", "amaranth", "numpy"]),
        ("import nearflash.training.cli", ["torch", "numpy"]),
    ],
)
def test_imports_stay_lean(statement, absent):
    script = f"import sys\n{statement}\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
