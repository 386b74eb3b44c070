"""What messages, help texts and pages advise exists: names to import, commands, options, extras, variables.

The files that pages name: test_paths.py.
"""

import argparse
import ast
import re
import subprocess
import tomllib
from functools import cache
from itertools import accumulate, chain
from pathlib import Path

import pytest

from nearflash.bench.options import options_of
from nearflash.bench.runner import bench_names, load_bench
from nearflash.cli.main import make_parser

ROOT = Path(__file__).resolve().parents[2]
NO_MODULES = {
    "nearflash.bitstream", "nearflash.command", "nearflash.device.attend", "nearflash.device.expand",
    "nearflash.device.update", "nearflash.xclbin",
}  # fmt: skip
"""Groups of entry points, and a file."""
FOREIGN = {"--no-deps": "pip", "--stat": "git", "--unshallow": "git", "--p2p": "xbutil", "--nproc": "torchrun",
           "--no-python": "torchrun", "--cores-root": "fusesoc", "--platform": "v++", "--tmg-ripup": "nextpnr",
           "--model-path": "sglang", "--enable-hierarchical-cache": "sglang", "--hicache-storage-backend": "sglang",
           "--hicache-storage-backend-extra-config": "sglang", "--l2-adapter": "lmcache"}  # fmt: skip
"""Options of other programs."""


@cache
def tracked() -> tuple[str, ...]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = listed or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return tuple(name for name in found if (ROOT / name).is_file())


@cache
def pages() -> tuple[tuple[str, str], ...]:
    """Place and text of each line of the pages; lines that end with a backslash go on."""
    return tuple(
        (f"{name}:{number}", line)
        for name in tracked() if name.endswith(".md") and name != "CHANGELOG.md"
        for number, line in enumerate((ROOT / name).read_text().replace("\\\n", " ").splitlines(), 1)
    )  # fmt: skip


def strings(nodes: list[ast.AST]):
    """Line and text of each string; what an f-string computes is a `?`."""
    inside = set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            parts = (str(part.value) if isinstance(part, ast.Constant) else "?" for part in node.values)
            yield node.lineno, "".join(parts)
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


@pytest.fixture(scope="module")
def advice(nodes) -> list[tuple[str, str]]:
    """Place and text of all that may advise."""
    found = [(f"{name}:{line}", text) for name, each in nodes.items() for line, text in strings(each)]
    return [*found, *pages()]


# Names


def is_there(name: str, names: dict[str, set[str]]) -> bool:
    """Whether a dotted name is a module or package of `names`, or what a module defines, imports or lists first."""
    if name in names:
        return True
    module, _, first = name.rpartition(".")
    while module and module not in names:
        module, _, first = module.rpartition(".")
    return first in names.get(module, ())


def defined(nodes: list[ast.AST]) -> set[str]:
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_every_dotted_name_can_be_imported(advice, nodes):
    names: dict[str, set[str]] = {name: defined(each) for name, each in nodes.items()}
    for module in nodes:
        for package in accumulate(module.split("."), "{}.{}".format):
            names.setdefault(package, set())  # a folder without a module of its own
    wrong = {
        f"{where}: {name}"
        for where, text in advice
        for name in re.findall(r"(?<![\w/.-])nearflash(?:\.[A-Za-z_]\w*)+", text)
        if name not in NO_MODULES and not is_there(name, names)
    }
    assert not wrong, "\n".join(sorted(wrong))


# Commands


@cache
def commands() -> dict[tuple[str, ...], set[str]]:
    """The options of each command by its words."""
    found: dict[tuple[str, ...], set[str]] = {}

    def walk(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
        found[words] = {"--verbose", "--help"}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, each in action.choices.items():
                    walk(each, (*words, word))
            found[words] |= set(action.option_strings)

    walk(make_parser(everything=True), ())
    for name in bench_names():
        found["bench", name] |= {f"--{option.replace('_', '-')}" for option in options_of(load_bench(name))}
    found["bench", "NAME"] = {"--json"}
    return found


def complaint(line: str) -> str | None:
    """What is wrong with a command line after `nearflash`."""
    words, path = line.split(), ()
    plain = [word.strip("'\"`.,:()") for word in words]
    while plain and (*path, plain[0]) in commands():
        path = (*path, plain.pop(0))
    if not path:
        return "no command"
    if any(len(each) > len(path) and each[: len(path)] == path for each in commands()) and plain:
        word = plain[0]
        if re.fullmatch(r"[a-z][\w-]+", word) and path != ("generate",):
            return f"no {word!r} of {' '.join(path)}"
    options = re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(words))
    return next((f"no {option} of {' '.join(path)}" for option in options if option not in commands()[path]), None)


def lines_of_commands(text: str):
    """What follows `nearflash` where it is called: in code, after a colon, or with an option; to where it ends."""
    called = re.compile(r"(`|: |\(|\brun |bin/|=\w+ |^ *|[;&|] )nearflash (?=[a-z])([^`\n;|)&#]*)", re.MULTILINE)
    for match in called.finditer(text):
        before, line = match[1], re.sub(r"'[^']*'", "?", match[2])
        known = (line.split()[0].strip("'\"`.,:()"),) in commands()
        if known or before == "`":
            yield line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`nearflash nosuch`", ["no command"]), ("run `nearflash plan MODEL --nosuch`", ["no --nosuch of plan"]),
        ("stored so (nearflash compress --form int4)", ["no --form of compress"]),
        ("again: nearflash state nosuch FILE", ["no 'nosuch' of state"]), ("nearflash stores K and V", []),
        ("nearflash emit && git diff --stat", [None]), ("`nearflash bench kv --json`", [None]),
    ],
)  # fmt: skip
def test_commands_are_recognised(text, found):
    assert [complaint(line) for line in lines_of_commands(text)] == found


def test_every_command_and_option_exists(advice):
    wrong = {
        f"{where}: nearflash {line[:60]}: {why}"
        for where, text in advice
        for line in lines_of_commands(text)
        if (why := complaint(line))
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_every_option_in_a_sentence_is_somebodys(advice, nodes):
    ours = set().union(*commands().values())
    for node in chain.from_iterable(nodes.values()):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            ours |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Compare):  # of sys.argv
            ours |= {str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)}
    wrong = {
        f"{where}: {option}"
        for where, text in advice if " " in text.strip() and "-->" not in text
        for option in re.findall(r"(?<![\w/-])--[a-z][\w-]*", text)
        if option not in ours | FOREIGN.keys()
    }  # fmt: skip
    assert not wrong, "\n".join(sorted(wrong))


# Extras, targets, variables


def test_every_extra_target_and_variable_exists(advice):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f"test-{folder.name}" for folder in (ROOT / "tests").iterdir() if folder.is_dir()}  # test-%
    read = set(re.findall(r"NEARFLASH_[A-Z0-9_]*[A-Z0-9]", makefile))
    for name in tracked():
        if name.endswith((".py", ".cpp", ".hpp", ".h", ".tcl")):
            read |= set(re.findall(r"NEARFLASH_[A-Z0-9_]*[A-Z0-9]", (ROOT / name).read_text(errors="replace")))
    wrong = set()
    for where, text in advice:
        named = re.findall(r"nearflash\[([a-z,]+)\]", text)
        wrong |= {f"{where}: [{extra}]" for each in named for extra in each.split(",") if extra not in extras}
        is_page = where.partition(":")[0].endswith(".md")
        calls = re.findall(r"(?:`|^ {4})make ([a-z-]+)", text) if is_page else re.findall(r"`make ([a-z-]+)", text)
        wrong |= {f"{where}: make {call}" for call in calls if call not in targets}
        variables = re.findall(r"NEARFLASH_[A-Z0-9_]*[A-Z0-9]", text) if is_page else ()
        wrong |= {f"{where}: {each}" for each in variables if each not in read}
    assert not wrong, "\n".join(sorted(wrong))
