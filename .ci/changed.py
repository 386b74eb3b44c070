"""Print the tests of what changed since main: the mirror of each changed source file, and changed tests themselves.

python .ci/changed.py [TESTS...]: the paths given, and those; on main, what changed since the last commit but one.
A source file's mirror is the test file of its name in the folder of its name, else that folder, else one above it.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("host/nearflash/", "rtl/nearflash/", "sim/nearflash/")


def list_changed() -> set[str]:
    """Paths that differ from where this branch left main, with what git does not track yet."""
    base = _git("merge-base", "HEAD", "main") if _git("branch", "--show-current") != "main" else ""
    base = base or _git("rev-parse", "--verify", "-q", "HEAD~1") or "HEAD"
    return {*_git("diff", "--name-only", base).split(), *_git("ls-files", "--others", "--exclude-standard").split()}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def find_tests(path: str) -> str | None:
    """The tests of one changed path, None where it has none of its own (`structure` looks at all files)."""
    if path.startswith("tests/"):
        file = Path(path)
        return path if file.name.startswith("test_") and (ROOT / path).is_file() else _folder(file.parent)
    for root in SOURCES:
        if path.startswith(root) and path.endswith(".py"):
            source = Path(path.removeprefix(root))
            mirror = Path("tests") / source.with_name(f"test_{source.name}")
            return str(mirror) if (ROOT / mirror).is_file() else _folder(mirror.parent)
    return None


def _folder(folder: Path) -> str | None:
    """The folder, or the nearest above it that has tests of its own; None for tests/ as a whole."""
    while folder != Path("tests") and not any((ROOT / folder).glob("**/test_*.py")):
        folder = folder.parent
    return str(folder) if folder != Path("tests") else None


def drop_nested(paths: Iterable[str]) -> list[str]:
    """The paths without those that lie in another of them: pytest would run their tests twice."""
    given = {Path(path) for path in paths}
    return sorted(str(path) for path in given if not given & set(path.parents))


def main() -> None:
    """Print the paths on one line."""
    print(*drop_nested([*sys.argv[1:], *filter(None, map(find_tests, list_changed()))]))


if __name__ == "__main__":
    main()
