"""The wheel of a board: what is in it, that its Python may be 3.10, and that it works alone."""

import ast
import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

BUILDER = Path(__file__).parents[2] / ".ci/board_wheel.py"
#: What Python 3.11 and 3.12 brought, as modules and names; `python310` alone may import them, where they are.
NEWER = {
    "tomllib", "wsgiref.types", "asyncio.TaskGroup", "asyncio.timeout", "contextlib.chdir", "datetime.UTC",
    "enum.EnumCheck", "enum.ReprEnum", "enum.StrEnum", "enum.member", "enum.nonmember", "enum.verify",
    "hashlib.file_digest", "itertools.batched", "math.cbrt", "math.exp2", "math.sumprod", "operator.call",
    "sys.exception", "typing.LiteralString", "typing.Never", "typing.NotRequired", "typing.Required", "typing.Self",
    "typing.TypeVarTuple", "typing.Unpack", "typing.assert_never", "typing.assert_type", "typing.override",
    "typing.reveal_type",
}  # fmt: skip
#: As Python 3.10 has it, for what runs here: without those of these names that the wheel could meet.
OLDER = """
import datetime, enum, hashlib, sys
import importlib.metadata, numpy  # which may need them
sys.version_info = (3, 10, 12, "final", 0)
sys.modules["tomllib"] = None
del datetime.UTC, hashlib.file_digest, enum.StrEnum  # not Self, which typing itself looks up
from nearflash.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, BUILDER, folder], check=True, stdout=subprocess.DEVNULL)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_it_has_what_a_board_needs_and_no_more(wheel, contents):
    assert wheel.name.startswith("nearflash_board-") and wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 4 << 20
    tops = {name.split("/")[1] for name in contents if name.startswith("nearflash/")}
    assert tops == {"abi", "bench", "bitstreams", "cli", "device", "model", "support"}
    for needed in ("device/backends/pynq/device.py", "device/replay.py", "model/fp/add.py", "abi/_tomllib/_parser.py",
                   "bitstreams/pynq-z2/board.toml", *(f"bitstreams/pynq-z2/{kernel}.{suffix}" for suffix in
                   ("bit", "hwh", "json") for kernel in ("update", "expand", "attend"))):  # fmt: skip
        assert f"nearflash/{needed}" in contents
    for other in ("device/backends/xrt", "device/backends/host/vector", "bitstreams/smartssd"):
        assert not [name for name in contents if name.startswith(f"nearflash/{other}")]
    points = contents[next(name for name in contents if name.endswith("entry_points.txt"))].decode()
    for driver in ("pynq = nearflash.device.backends.pynq.device:PynqDevice",
                   "zynq = nearflash.device.backends.zynq.device:ZynqDevice"):  # fmt: skip
        assert points.count(f"\n{driver}\n") == 3
    metadata = contents[next(name for name in contents if name.endswith("METADATA"))].decode()
    assert "Requires-Python: >=3.10\n" in metadata
    assert [line for line in metadata.splitlines() if line.startswith("Requires-Dist")] == [
        "Requires-Dist: numpy>=1.21"
    ]


def test_its_record_has_every_file(contents):
    record = contents[next(name for name in contents if name.endswith("RECORD"))].decode().splitlines()
    listed = dict(line.rsplit(",", 2)[:2] for line in record)
    assert listed.keys() == contents.keys()
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert listed[name] in (f"sha256={digest}", "") and (listed[name] or name.endswith("RECORD"))


def names_used(tree):
    """Modules, and names of modules, that a module imports or takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def test_every_module_is_python_3_10(contents):
    sources = {
        name: text.decode() for name, text in contents.items() if name.endswith(".py") and "_tomllib" not in name
    }
    assert len(sources) > 100
    wrong = []
    for name, text in sources.items():
        tree = ast.parse(text, name, feature_version=(3, 10))
        if name != "nearflash/abi/python310.py":
            wrong += [f"{name}: {used}" for used in names_used(tree) if used in NEWER]
    assert not wrong, "\n".join(wrong)


def test_every_first_party_import_is_in_it(contents):
    """Those of a command that a board has no use for excepted: they need the whole of nearflash."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in contents}
    for name, text in contents.items():
        if not name.endswith(".py") or name.startswith(("nearflash/cli/", "nearflash/bench/")):
            continue
        imported = {each for each in names_used(ast.parse(text)) if each.startswith("nearflash.")}
        missing = [each for each in imported if each not in modules and each.rpartition(".")[0] not in modules]
        assert not missing, f"{name} imports {missing}"


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """The wheel's command, with NumPy and nothing else of this environment, on an older standard library."""
    folder = tmp_path_factory.mktemp("board")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    packages = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (packages / name).exists():
            (folder / name).symlink_to(packages / name)

    def run(*arguments):
        code = f"import sys\nsys.path.insert(0, {str(folder)!r})\n{OLDER}"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NEARFLASH")}
        command = [sys.executable, "-I", "-S", "-c", code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    return run


def test_it_works_alone_on_python_3_10s_library(run):
    assert run("--version").stdout.startswith("nearflash 0.")
    done = run("bitstream", "verify", "pynq-z2")
    assert (done.returncode, done.stdout.count(" files as built")) == (0, 3), done.stderr
    for name, size in (("update", "params"), ("expand", "columns"), ("attend", "tokens")):
        done = run("selftest", "--device", f"model:{name}-tiny", f"--{size}", "40")
        assert done.returncode == 0 and done.stdout.endswith(" 0 mismatches\n"), done.stderr
    done = run("selftest", "--device", "pynq:expand-pynq-z2")
    assert done.returncode == 2 and "device 'pynq' needs the package 'pynq': run on a board" in done.stderr
