"""Builds `nearflash-board`: one wheel with what a Zynq board under PYNQ needs, for Python 3.10 and NumPy as it has it.

It has the drivers `pynq` and `zynq`, the reference models, selftest, replay, and the committed bitstreams of Zynq
boards: the modules that those import, and no others. Usage: python .ci/board_wheel.py FOLDER
"""

import ast
import base64
import hashlib
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = ROOT / "host"
NAME, PYTHON, NUMPY = "nearflash-board", "3.10", "1.21"
DEVICES = ("model", "pynq", "replay", "zynq")
COMMAND = "nearflash.cli.main:main"
#: Packages whose imports in functions count, too; what others import in functions a board has no use for.
WHOLE = ("abi", "device", "model", "support")
#: What a command imports when it is called.
CALLED = ("nearflash.device.selftest.bringup", "nearflash.device.replay", "nearflash.device.bitstreams.manifest")
_EPOCH = (2000, 1, 1, 0, 0, 0)


def find_source(module: str) -> Path | None:
    """The file of a module of host/, if it is one."""
    path = HOST.joinpath(*module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def list_imports(module: str, source: Path) -> Iterator[str]:
    """Modules of ours that a module imports, and names from them, which may be modules."""
    tree = ast.parse(source.read_text("utf-8"))
    for node in ast.walk(tree) if module.split(".")[1:2] and module.split(".")[1] in WHOLE else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def find_closure(roots: list[str]) -> dict[str, Path]:
    """Every module that the roots import, by name, with the packages around it."""
    found: dict[str, Path] = {}
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        source = find_source(module)
        if module in found or source is None or not module.startswith("nearflash."):
            continue
        found[module] = source
        parts = module.split(".")
        waiting += [".".join(parts[:count]) for count in range(2, len(parts))]
        waiting += list_imports(module, source)
    return found


def entry_points(project: dict) -> dict[str, dict[str, str]]:
    """The groups of entry points of a board."""
    devices = {
        group: points for group, points in project["entry-points"].items() if group.startswith("nearflash.device.")
    }
    groups = {group: {name: points[name] for name in DEVICES} for group, points in devices.items()}
    return {"console_scripts": {"nearflash": COMMAND}} | groups


def list_files(groups: dict[str, dict[str, str]]) -> dict[str, Path]:
    """Files of the wheel by their names in it: modules, tomllib, and the bitstreams of Zynq boards."""
    roots = [value.partition(":")[0] for points in groups.values() for value in points.values()]
    files = {str(path.relative_to(HOST)): path for path in find_closure([*roots, *CALLED]).values()}
    files |= {f"nearflash/abi/_tomllib/{path.name}": path for path in Path(tomllib.__file__).parent.glob("*.py")}
    for board in sorted(ROOT.glob("bitstreams/*/board.toml")):
        if tomllib.loads(board.read_text())["backend"] in ("pynq", "zynq") and list(board.parent.glob("*.bit")):
            kept = (path for path in board.parent.iterdir() if path.suffix in (".toml", ".json", ".bit", ".hwh", ".xz"))
            files |= {f"nearflash/bitstreams/{path.relative_to(ROOT / 'bitstreams')}": path for path in kept}
    return files


def build(folder: Path) -> Path:
    """Write the wheel into a folder; equal sources give equal bytes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups, version = entry_points(project), project["version"]
    info = f"{NAME.replace('-', '_')}-{version}.dist-info"
    contents = {name: path.read_bytes() for name, path in sorted(list_files(groups).items())}
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in groups.items()
    )
    metadata = (
        f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\nSummary: nearflash on a board under PYNQ\n"
        f"License: {project['license']}\nRequires-Python: >={PYTHON}\nRequires-Dist: numpy>={NUMPY}\n"
    )
    contents[f"{info}/METADATA"] = metadata.encode()
    contents[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: nearflash\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{info}/entry_points.txt"] = points.encode()
    contents[f"{info}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = "".join(f"{name},{digest(content)},{len(content)}\n" for name, content in contents.items())
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return path


def digest(content: bytes) -> str:
    """A file's entry in RECORD."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    built = build(Path(sys.argv[1]))
    print(f"{built}: {built.stat().st_size} bytes")
