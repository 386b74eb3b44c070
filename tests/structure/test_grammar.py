"""The grammar of names and docstrings: functions do, classes are, and a name means one thing."""

import ast
import re
from collections import defaultdict

#: Past participles that do not end with -ed, as first words of functions.
IRREGULAR = {
    "begun", "bound", "broken", "built", "chosen", "done", "drawn", "fed", "found", "frozen", "given", "grown",
    "held", "hidden", "kept", "known", "laid", "led", "left", "lost", "made", "meant", "met", "paid", "said", "seen",
    "sent", "shown", "sorted", "spent", "stored", "taken", "thrown", "told", "won", "worn", "written",
}  # fmt: skip

#: Words that end with -ed and are verbs or nouns.
VERBS = frozenset(["embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed", "succeed"])
#: Docstrings say what a thing is or does; with these first they continue a sentence that nobody has begun.
NO_BEGINNING = re.compile(r"(Of|That|Those|With|By|What|Where)\b")


def is_participle(name: str) -> bool:
    first = name.strip("_").split("_")[0]
    return first in IRREGULAR or (first.endswith("ed") and first not in VERBS)


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_functions_begin_with_no_participle(nodes):
    """`fetch`, not `fetched`: a participle reads as a value. Properties are values."""
    wrong = [
        f"{module}:{node.lineno}: {node.name}"
        for module, own in nodes.items()
        for node in own
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name)
        if not is_property(node)
    ]
    assert not wrong, "\n".join(wrong)


def _twins(modules: list[str]) -> bool:
    tops = sorted(module.split(".")[1] for module in modules)
    return tops in (["abi", "gateware"], ["gateware", "model"])


def test_docstrings_begin_a_sentence(nodes):
    wrong = [
        f"{module}: {getattr(node, 'name', 'the module')}: {text.splitlines()[0]}"
        for module, own in nodes.items()
        for node in own
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if NO_BEGINNING.match(text := ast.get_docstring(node) or "")
    ]
    assert not wrong, "\n".join(wrong)


def test_public_classes_have_names_of_their_own(modules):
    """What gateware computes has the name that the contract or the model gives it."""
    homes = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    wrong = [f"{name}: {', '.join(places)}" for name, places in homes.items() if len(places) > 1 and not _twins(places)]
    assert not wrong, "\n".join(wrong)
