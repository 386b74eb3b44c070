"""The namespace, the mirrored trees, and what is generated."""

import ast
import subprocess
from pathlib import Path

import pytest

from nearflash.abi.emit import outputs

#: Model modules with no gateware of the same path: what they hold is spread over several units there, or in none yet.
MODEL_ONLY: set[str] = {
    "weights/fields.py", "weights/rans.py", "fp/bits.py", "update/state.py",
    *(f"attention/{name}.py" for name in ("random_vectors", "vectors", "gather", "head")),
    *(f"attention/memory/{name}.py" for name in (
        "finite", "image", "index", "placement", "settings", "source", "traffic")),
}  # fmt: skip


#: What the repository has at its top; a bench that was killed left its folder of 38 MB in a commit once.
TOP = {
    ".ci", ".gitattributes", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "README.md", "SECURITY.md",
    "bitstreams", "constraints.txt", "docs", "hatch_build.py", "hls", "host", "mkdocs.yml", "pyproject.toml",
    "rtl", "sim", "tests",
}  # fmt: skip


def is_component(tree: ast.Module) -> bool:
    """A public class here derives from wiring.Component."""
    return any(
        isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        and any(ast.unparse(base).split(".")[-1] == "Component" for base in node.bases)
        for node in tree.body
    )  # fmt: skip


def sources(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*.py") if p.name != "__init__.py"}


def test_nothing_else_is_at_the_top(root):
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("no git checkout")
    assert {name.split("/")[0] for name in listed} <= TOP


def test_nearflash_is_a_namespace_over_three_roots(root):
    for package_root in ("host", "rtl", "sim"):
        assert not (root / package_root / "nearflash" / "__init__.py").exists()
        stray = [p for p in (root / package_root).rglob("*.py") if (root / package_root / "nearflash") not in p.parents]
        assert not stray, f"importable as a top-level module: {stray}"


def test_every_package_has_a_docstring(modules, root):
    for package_root in ("host", "rtl", "sim"):
        top = root / package_root / "nearflash"
        folders = {p.parent for p in top.rglob("*.py")} - {top}
        missing = [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
        assert not missing, f"packages without an __init__.py: {missing}"
    assert all(ast.get_docstring(tree) for tree in modules.values())


def test_every_component_has_its_test_or_is_a_part_of_one_that_has(modules, root):
    """A part is a component that one of the same package, or a kernel's top, builds in."""
    parts: dict[str, set[str]] = {}
    for name, tree in modules.items():
        if name.startswith("nearflash.gateware.") and is_component(tree):
            imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
            package = name.rpartition(".")[0]
            parts[name] = {used for used in imports if package.endswith(".top") or used.rpartition(".")[0] == package}
    covered = {name for name in parts if _has_test(root, name)}
    waiting = set(covered)
    while waiting:
        waiting = set().union(*(parts[name] & set(parts) for name in waiting)) - covered
        covered |= waiting
    missing = sorted(set(parts) - covered)
    assert not missing, f"no tests/gateware/.../test_<name>.py for {missing} nor for what they are part of"


def _has_test(root: Path, name: str) -> bool:
    *folders, file = name.split(".")[2:]
    return root.joinpath("tests", "gateware", *folders, f"test_{file}.py").exists()


def test_every_model_has_its_twin_and_its_test(root):
    model, gateware = root / "host/nearflash/model", root / "rtl/nearflash/gateware"
    assert sources(model) - MODEL_ONLY <= sources(gateware)
    assert sources(model) - sources(gateware) >= MODEL_ONLY, "MODEL_ONLY names only what is so"
    untested = [s for s in sources(model) - MODEL_ONLY
                if not (root / "tests/model" / s).with_name(f"test_{Path(s).name}").exists()]  # fmt: skip
    assert not untested


def test_tests_are_no_package(root):
    assert not list((root / "tests").rglob("__init__.py"))


def test_generated_files_are_fresh(root):
    stale = [
        path for path, text in outputs().items() if not (root / path).exists() or (root / path).read_text() != text
    ]
    assert not stale, f"run `make emit`: {stale}"


def test_generated_files_are_marked(root):
    marked = {line.split()[0] for line in (root / ".gitattributes").read_text().splitlines() if "generated" in line}
    assert {str(path) for path in outputs()} | {"docs/results/*.md"} <= marked
