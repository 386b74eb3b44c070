"""What the pages put between back-ticks exists: files and folders, modules, classes, functions, devices.

`test_advice.py` has what messages and help texts advise, too: dotted names of `nearflash`, commands with their options.
"""

import ast
import fnmatch
import re
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from nearflash.abi.kernel.config import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
SUFFIXES = "py|cpp|hpp|h|md|tcl|sv|v|toml|json|jsonl|bit|hwh|png"
WRITTEN = {
    "adapter_config.json", "compression.json", "config.json", "generation_config.json", "model.safetensors.index.json",
    "nearflash-experts.json", "nearflash-plan.json",  # a model's folder
    "system.tcl", "connect.tcl", "nand_phy.v", "update.v", "litenvme_core.v",  # a package for Vivado
    "amsgrad.hpp", "amsgrad.py", "optimizer.state", "x/y.py", "tests/gateware/x/test_y.py",
    "docs/results/speed.md",  # examples
}  # fmt: skip
"""Files that commands write or other projects have, and examples."""
ELSEWHERE = {
    "torch", "transformers", "peft", "accelerate", "amaranth", "pynq", "np", "dist", "data",  # modules
    "DistributedDataParallel", "GradScaler", "PeftModel", "HfDeepSpeedConfig", "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter", "AlignDevicesHook", "Adagrad", "Overlay", "True", "False", "None", "FILE", "NAME",
    "dispatch_model", "get_peft_model", "set_optimizer_state_dict", "get_optimizer_state_dict", "help", "load_adapter",
    "save_pretrained", "make_bd_pins_external", "fma", "rn", "significand", "order",
}  # fmt: skip
"""Modules, classes and functions of other projects, and of formulas."""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = listed or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return [name for name in found if (ROOT / name).is_file()]


def page_text(name: str) -> str:
    """A page without its fenced code; of the changelog, without what was removed."""
    text = re.sub(r"(?m)^```.*?^```$", "", (ROOT / name).read_text(), flags=re.DOTALL)
    return re.sub(r"(?m)^### Removed$.*?(?=^##|\Z)", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Files and folders, with a slash before each and after each folder."""
    names = [f"/{name}" for name in tracked()]
    return [*names, *{f"{parent}/".replace("//", "/") for name in names for parent in Path(name).parents}]


@pytest.fixture(scope="module")
def spans() -> list[tuple[str, str]]:
    """Page and text of every span of code."""
    names = [name for name in tracked() if name.endswith(".md")]
    return [(name, span) for name in names for span in re.findall(r"`([^`\n]+)`", page_text(name))]


@pytest.fixture(scope="module")
def paths(spans: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Page and path: the spans that are one, and what begins with a folder of ours anywhere."""
    rooted = re.compile(r"(?<![\w./-])((?:docs|tests|host|sim|rtl|hls|bitstreams)/[\w./-]*\w)")
    pages = {page for page, _ in spans}
    plain = [(page, path) for page in pages for path in rooted.findall(page_text(page))]
    return [(page, path) for page, span in spans if is_path(span) for path in expanded(span)] + plain


@pytest.fixture(scope="module")
def names(nodes: dict[str, list[ast.AST]]) -> set[str]:
    """What our sources define or import: classes, functions, variables, attributes, arguments; C++ words, too."""
    found = {word for path in (ROOT / "hls").rglob("*.[ch]pp") for word in re.findall(r"\w+", path.read_text())}
    for own in nodes.values():
        for node in own:
            found |= set(defined_names(node))
    return found


def defined_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.Import(names=imported) | ast.ImportFrom(names=imported):
            yield from (each.asname or each.name for each in imported)


def expanded(path: str) -> list[str]:
    """`a/{b,c}` as a/b and a/c."""
    parts = re.split(r"\{([\w,]+)\}", path)
    choices = [part.split(",") if number % 2 else [part] for number, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def is_file(path: str, files: list[str]) -> bool:
    """Whether a file or folder ends so; a module may stand without its suffix."""
    endings = {path, f"{path.rstrip('/')}/", f"{path}.py"}
    if "*" in path:
        return any(fnmatch.fnmatch(name, f"*/{path}") for name in files)
    return any(name.endswith(f"/{ending}") for name in files for ending in endings)


def is_path(span: str) -> bool:
    """A name with a slash or a suffix of ours that is no placeholder, no address and nothing that a build writes."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*(/[\w.*{},-]+)*/?", span) is not None
    named = "/" in span or re.search(rf"\.(?:{SUFFIXES})$", span) is not None
    return plain and named and span not in WRITTEN and not span.startswith("build/")


def test_paths_exist(paths, files):
    wrong = {f"{page}: {path}" for page, path in paths if path not in WRITTEN and not is_file(path, files)}
    assert not wrong, "\n".join(sorted(wrong))


def test_pages_that_sources_name_exist(files):
    sources = [name for name in tracked() if re.search(r"\.(py|hpp|h|toml|yml)$", name)]
    wrong = {
        f"{source}: {page}"
        for source in sources
        for page in re.findall(r"\bdocs/[\w/.-]*\w", (ROOT / source).read_text())
        if page not in WRITTEN and not is_file(page, files)
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_classes_and_functions_exist(spans, names):
    """`Name`, `Name(...)`, `name(...)`, and after dots: the words that stand for a class or are called."""
    wrong = set()
    for page, span in spans:
        if not re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", span) or is_path(span):
            continue
        words = span.partition("(")[0].split(".")
        asked = [word for word in words if re.match(r"[A-Z]+[a-z]\w*$", word)] + words[-1:] * ("(" in span)
        if words[0] not in ELSEWHERE and (missing := {*asked} - names - ELSEWHERE):
            wrong.add(f"{page}: {span}: no {', '.join(missing)}")
    assert not wrong, "\n".join(sorted(wrong))


def test_modules_of_names_exist(spans, nodes):
    """`module.Name`: some module of that name has it."""
    found: dict[str, set[str]] = {}
    for name, own in nodes.items():
        found.setdefault(name.rpartition(".")[2], set()).update(
            defined for node in own for defined in defined_names(node)
        )
    wrong = set()
    for page, span in spans:
        match = re.fullmatch(r"(?:\w+\.)*([a-z_]\w*)\.([A-Z]\w*[a-z]\w*)(\(.*\))?", span)
        if match and span.split(".")[0] not in ELSEWHERE and match[2] not in found.get(match[1], ()):
            wrong.add(f"{page}: {span}")
    assert not wrong, "\n".join(sorted(wrong))


def test_devices_exist(spans):
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    backends = {kernel: groups[f"nearflash.device.{kernel}"].keys() for kernel in ("update", "attend", "expand")}
    wrong = {
        f"{page}: {backend}:{build}"
        for page, span in spans
        for backend, build, kernel in re.findall(r"\b([a-z]+):((update|attend|expand)(?:-[\w-]+)?)", span)
        if backend in set().union(*backends.values())
        and (backend not in backends[kernel] or build not in {kernel, *CONFIGS})
    }
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize(
    ("span", "there"),
    [
        ("docs/guides", True), ("host/nearflash/abi/", True), ("abi/errors.py", True), ("abi/errors", True),
        ("stream/nosuch.py", False), ("nosuch/", False), ("parts/*.toml", True), ("parts/*.nosuch", False),
    ],
)  # fmt: skip
def test_a_path_is_a_whole_ending(span, there, files):
    assert is_path(span) and is_file(span, files) == there
