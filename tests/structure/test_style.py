"""Limits that keep files and methods readable, and serialisation that runs no code."""

import ast

UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def elaborate_lengths(nodes) -> dict[str, int]:
    lengths = {}
    for name, own in nodes.items():
        for node in own:
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "elaborate":
                        lengths[f"{name}.{node.name}"] = (method.end_lineno or 0) - method.lineno + 1
    return lengths


def test_files_are_short(python_files):
    long = {str(path): n for path in python_files if (n := len(path.read_text().splitlines())) > 500}
    assert not long


def test_elaborate_is_short(nodes):
    lengths = elaborate_lengths(nodes)
    assert lengths
    assert sorted(lengths.values())[len(lengths) * 3 // 4] <= 40, "three quarters of them within 40 lines"


def test_gateware_functions_are_at_most_60_lines(nodes):
    long = {
        f"{name}.{node.name}": lines
        for name, own in nodes.items()
        if name.startswith("nearflash.gateware.")
        for node in own
        if isinstance(node, ast.FunctionDef) and (lines := (node.end_lineno or 0) - node.lineno + 1) > 60
    }
    assert not long


def test_nothing_is_pickled(nodes):
    found = []
    for name, own in nodes.items():
        for node in own:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                found += [f"{name}: {n}" for n in names if n.split(".")[0] in UNSAFE]
            if isinstance(node, ast.Call):
                keywords = {k.arg: k.value for k in node.keywords}
                loads = ast.unparse(node.func) == "torch.load" and "weights_only" not in keywords
                if loads or any(ast.unparse(v) == "True" for k, v in keywords.items() if k == "allow_pickle"):
                    found.append(f"{name}: {ast.unparse(node)}")
    assert not found
