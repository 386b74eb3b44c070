"""The source files that the rules of the house are about."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_ROOTS = ("host", "rtl", "sim")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def modules() -> dict[str, ast.Module]:
    """Syntax trees of all our packages by dotted name (`nearflash.device.base`; a package by its own name)."""
    trees = {}
    for package_root in PACKAGE_ROOTS:
        for path in sorted((ROOT / package_root).rglob("*.py")):
            parts = path.relative_to(ROOT / package_root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            assert name not in trees, f"{name} exists under two roots"
            trees[name] = ast.parse(path.read_text(), str(path))
    return trees


@pytest.fixture(scope="session")
def nodes(modules: dict[str, ast.Module]) -> dict[str, list[ast.AST]]:
    """All nodes of each module: walking the trees takes as long as parsing them."""
    return {name: list(ast.walk(tree)) for name, tree in modules.items()}


@pytest.fixture(scope="session")
def python_files() -> list[Path]:
    """Every Python file of packages and tests."""
    return [path for top in (*PACKAGE_ROOTS, "tests") for path in sorted((ROOT / top).rglob("*.py"))]
