"""Which package may import which: the table of the design, enforced."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

#: First-party packages that a package may import, beside itself.
MAY_IMPORT = {
    "abi": set(),
    "model": {"abi"},
    "device": {"abi"},
    "storage": {"abi", "device"},
    "training": {"abi", "device", "storage"},
    "inference": {"abi", "device", "storage"},
    "bench": {"abi", "device", "storage", "training", "model"},
    "demo": {"abi", "device", "storage", "training", "bench"},
    "cli": {"abi", "device", "storage", "training", "bench"},
    "gateware": {"abi"},
    "sim": {"abi", "model", "gateware", "device"},
}
#: Single modules that may import more.
MORE = {
    module: {"model"}
    for module in (
        "device.model",
        "device.attend_model",
        "device.attend_nand",
        "device.expand_model",
        "device.selftest.attend",
        "device.selftest.expand",
        "demo.audit",
    )
}
#: Third-party packages of those that stay lean; the others may use what pyproject.toml declares.
LEAN = {
    "abi": set(),
    "model": {"numpy"},
    "device": {"numpy"},
    "storage": {"numpy", "crc32c"},
    "bench": set(),
    "cli": set(),
    "gateware": {"amaranth"},
}
#: Imported in a function, only when it is called and where it is installed.
LAZY = {"nearflash.device.matrix": {"crc32c"}, "nearflash.device.topk": {"crc32c"}}
#: Loaded by a device that needs them, which says so where they are missing.
FOR_ONE_DEVICE = {"nearflash.device.vector.compiled": {"numba", "llvmlite"}}


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


def test_first_party_arrows(modules):
    wrong = []
    for name, tree in modules.items():
        module = name.removeprefix("nearflash.")
        package = module.split(".")[0]
        assert package in MAY_IMPORT, f"{name} needs a row in MAY_IMPORT"
        allowed = MAY_IMPORT[package] | MORE.get(module, set()) | {package}
        for target in imports(tree):
            top, _, rest = target.partition(".")
            if top == "nearflash" and rest.split(".")[0] not in allowed:
                wrong.append(f"{name} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_lean_packages_name_no_other_third_party(modules):
    wrong = []
    for name, tree in modules.items():
        package = name.removeprefix("nearflash.").split(".")[0]
        if package not in LEAN:
            continue
        allowed = (
            LEAN[package]
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
        ("import nearflash.device, nearflash.device.host, nearflash.device.replay", ["torch", "amaranth"]),
        ("import nearflash.device", ["numba"]),
        ("from nearflash.device import available_devices; available_devices()", ["torch", "amaranth", "nearflash.sim"]),
        ("import nearflash.cli", ["torch", "amaranth", "numpy"]),
        ("import nearflash.training.cli", ["torch", "numpy"]),
    ],
)
def test_imports_stay_lean(statement, absent):
    script = f"import sys\n{statement}\nprint([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
