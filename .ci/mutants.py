"""How many random mutants of host/ the tests of make test notice: python .ci/mutants.py [COUNT] [SECONDS EACH] [SEED].

Each mutant changes one place of one file in a copy of the tree: a comparison turned round, an integer one more or less,
a condition negated, or a statement dropped. It is killed where a test of its package fails: first those of the file's
own name, then up to ten files that name its module, then all of tests/PACKAGE. A JSON line each; the last is the score.
"""

import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEED = 46
FLIPPED = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


def list_mutations(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Places that can be mutated, and how; not __all__, whose loss changes nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            continue
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield "comparison", node
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield "constant", node
        elif isinstance(node, ast.If | ast.IfExp):
            yield "condition", node
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield "statement", node


def mutate(kind: str, node: ast.AST, rng: random.Random) -> None:
    """Change a node of its tree in place."""
    if isinstance(node, ast.Compare) and kind == "comparison":
        node.ops = [FLIPPED[type(node.ops[0])]()]
    elif isinstance(node, ast.Constant):
        node.value += rng.choice((-1, 1))
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    else:  # a call of no effect in the statement's place
        node.__class__, node.__dict__ = ast.Pass, {key: node.__dict__[key] for key in ("lineno", "col_offset")}


def choose(rng: random.Random, tree_root: Path) -> tuple[Path, str, int, str]:
    """A random mutant: its file, the kind, the line, and the file's text with it. Long files have more of them."""
    files = sorted((tree_root / "host/nearflash").rglob("*.py"))
    sizes = [path.stat().st_size for path in files]
    while True:
        path = rng.choices(files, sizes)[0]
        original = ast.parse(path.read_text())
        tree = copy.deepcopy(original)
        if places := list(list_mutations(tree)):
            kind, node = rng.choice(places)
            line = node.lineno
            mutate(kind, node, rng)
            if ast.dump(tree) != ast.dump(original):
                return path.relative_to(tree_root), kind, line, ast.unparse(ast.fix_missing_locations(tree))


def find_tests(path: Path) -> list[list[str]]:
    """Tests that may notice a change of a file, those that do so fastest first."""
    parts = path.relative_to("host/nearflash").with_suffix("").parts
    module, area = ".".join(parts).removesuffix(".__init__"), f"tests/{parts[0]}"
    mirror = ROOT / "tests" / Path(*parts[:-1]) / f"test_{parts[-1]}.py"
    parent, _, leaf = module.rpartition(".")
    name = re.compile(rf"nearflash\.{re.escape(module)}\b|from nearflash\.{re.escape(parent)} import [^\n]*\b{leaf}\b")
    tests = [path for path in sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: area not in str(path))
             if path != mirror and "structure" not in path.parts]  # fmt: skip
    importing = [str(path.relative_to(ROOT)) for path in tests if name.search(path.read_text())][:10]
    own = [str(mirror.relative_to(ROOT))] if mirror.is_file() else []
    return [tests for tests in (own, importing, [area] if (ROOT / area).is_dir() else []) if tests]


def run_mutant(tree: Path, path: Path, text: str, limit_s: float) -> str:
    """The test that failed, `time` where they took too long (an endless loop), empty where all passed."""
    target = tree / path
    before = target.read_text()
    target.write_text(text)
    paths = os.pathsep.join(str(tree / root) for root in ("host", "rtl", "sim"))
    try:
        for tests in find_tests(path):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", "-p", "no:cacheprovider", *tests]
            done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": paths}, capture_output=True,
                                  text=True, timeout=limit_s)  # fmt: skip
            if done.returncode not in (0, 5):
                found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return found[1] if found else done.stdout[-200:] or "pytest"
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        target.write_text(before)
    return ""


def main() -> None:
    """Print each mutant as a JSON line, and the score."""
    count, limit_s, seed = int((*sys.argv[1:], 60)[0]), float((*sys.argv[2:], 600)[0]), int((*sys.argv[3:], SEED)[0])
    rng, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in tracked.splitlines():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
        for number in range(1, count + 1):
            path, kind, line, text = choose(rng, tree)
            noticed = run_mutant(tree, path, text, limit_s)
            killed += bool(noticed)
            row = {"file": str(path), "line": line, "kind": kind, "killed_by": noticed}
            print(json.dumps(row | {"killed": killed, "of": number}), flush=True)
    print(json.dumps({"mutants": count, "killed": killed, "share": round(killed / count, 3)}))


if __name__ == "__main__":
    main()
