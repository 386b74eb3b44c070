"""Users' files have one writer, `nearflash.support.files`: no other code makes, renames or replaces one."""

import ast
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "a build folder, whose files nobody else reads, and which takes its name when it is complete"
SCRATCH = "a folder of this process's own, with a name that nobody knows, which goes when it ends"
EXCEPT = {
    "host/nearflash/support/files.py": "the writer itself",
    "host/nearflash/device/backends/pynq/lock.py": "a lock in /run, which says until the board restarts what is loaded",
    "host/nearflash/device/backends/zynq/manager.py": "attributes of the FPGA manager, in /sys",
    "host/nearflash/storage/io/direct.py": "makes the large files that are written in place, each under its own lock",
    "host/nearflash/support/process.py": "/proc",
    "host/nearflash/bench/limits.py": "/sys/fs/cgroup",
    "host/nearflash/training/checks/edits.py": "a copy in memory, not a file",
    "host/nearflash/cli/doctor.py": "tries O_DIRECT, on a file with a random name that must not exist",
    "host/nearflash/weights/converted.py": "a folder complete and flushed beside its place, then given its name",
    "host/nearflash/offload/results.py": "lines are added in place, each durable before it is reported, under a lock",
    **{
        f"host/nearflash/bench/{bench}.py": SCRATCH
        for bench in (
            "inference/chat",
            "offload/mixture",
            "storage/fuzz/*",
            "storage/delta_crashes",
            "storage/kept_crashes",
        )
    },
    "host/nearflash/support/cache.py": BUILD,
    "host/nearflash/support/native.py": BUILD,
    "sim/nearflash/sim/verilator/*": BUILD,
    "sim/nearflash/sim/verilog.py": BUILD,
    "sim/nearflash/verify/fixtures/boards/folder.py": "the folder of a simulated board, made for one test",
    "sim/nearflash/verify/*": BUILD,
    "rtl/nearflash/boards/open/*": BUILD,
    "rtl/nearflash/boards/vendor/kernel.py": SCRATCH,
    "rtl/nearflash/boards/vendor/tools.py": BUILD,
}
"""Who else may, and why."""
MODES = frozenset("wax+")
CALLS = {
    "write_text", "write_bytes", "rename", "renames", "touch", "link", "symlink_to", "hardlink_to", "symlink",
    "copyfile", "copy2", "copytree", "tofile", "save_file", "serialize_file", "mktemp", "NamedTemporaryFile", "mkstemp",
}  # fmt: skip
OF_MODULES = {("os", "replace"), ("shutil", "move"), ("shutil", "copy")}
FLAGS = {"O_CREAT", "O_TRUNC"}
LIBRARIES = ("np", "numpy", "torch", "figure", "pyplot", "plt")
TO_A_FILE = {"savefig", "save", "savez", "savez_compressed", "savetxt"}
"""Of libraries: they take a path or a file. Ours give them the file of `replace_file`, called `out`, or a buffer."""


def writers(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and call of everything that makes, renames or replaces a file."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in FLAGS:
            yield node.lineno, node.attr
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        first = ast.unparse(node.args[0]) if node.args else ""
        if name in CALLS or (owner, name) in OF_MODULES:
            yield node.lineno, name
        elif name == "replace" and owner and len(node.args) == 1 and not node.keywords:  # of texts it takes two
            yield node.lineno, f"{owner}.replace({first})"
        elif name in ("open", "fdopen") and owner != "os" and opens_to_write(node, owner):
            yield node.lineno, f"{owner}.open"
        elif name in TO_A_FILE and owner.split(".")[0] in LIBRARIES and first not in ("out", "buffer"):
            yield node.lineno, f"{owner}.{name}({first})"


def opens_to_write(call: ast.Call, owner: str) -> bool:
    """Whether a call of open, or of a path's open, has a mode that writes. `os.open` is found by its flags."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    given += call.args[0 if owner else 1 :][:1]
    return any(isinstance(each, ast.Constant) and MODES & set(str(each.value)) for each in given)


def sources() -> list[str]:
    return [str(path.relative_to(ROOT)) for root in ("host", "rtl", "sim") for path in (ROOT / root).rglob("*.py")]


def found(source: str, nodes: dict[str, list[ast.AST]]) -> list[tuple[int, str]]:
    module = ".".join(Path(source).with_suffix("").parts[1:]).removesuffix(".__init__")
    return list(writers(nodes[module]))


def test_only_the_durable_writer_writes(nodes):
    others = [source for source in sources() if not any(fnmatch(source, known) for known in EXCEPT)]
    wrong = [f"{source}:{line}: {call}" for source in others for line, call in found(source, nodes)]
    assert not wrong, "write them with nearflash.support.files: " + ", ".join(wrong)


@pytest.mark.parametrize("known", [known for known, why in EXCEPT.items() if not why.startswith("pending")])
def test_no_exception_is_out_of_date(known, nodes):
    assert EXCEPT[known]
    assert any(found(source, nodes) for source in sources() if fnmatch(source, known))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("path.write_text('a')", 1), ("os.replace(a, b)", 1), ("a.replace(b)", 1), ("os.rename(a, b)", 1),
        ("open(p, 'w')", 1), ("open(p, mode='ab')", 1), ("p.open('r+b')", 1), ("gzip.open(p, 'wb')", 0),
        ("os.open(p, os.O_WRONLY | os.O_CREAT)", 1), ("np.savez(path, a=1)", 1), ("figure.savefig(path)", 1),
        ("text.replace('a', 'b')", 0), ("replace(a, b=1)", 0), ("dataclasses.replace(a, b=1)", 0), ("open(p)", 0),
        ("p.open('rb')", 0), ("figure.savefig(out, dpi=1)", 0), ("shutil.copyfile(a, b)", 1),
    ],
)  # fmt: skip
def test_writers_are_recognised(text, expected):
    assert len(list(writers(ast.walk(ast.parse(text))))) == expected
