"""How much is tested and explained: lines of tests to lines of source, and the share of comments.

`python tests/structure/test_figures.py` prints the figures. Lines that are blank do not count; verification (proofs,
mutation vectors, testbenches) counts as tests.
"""

import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERIFICATION = ROOT / "sim/nearflash/verify"
#: Least lines of tests to a line of source.
TESTS_TO_SOURCE, ABI_TESTS_TO_SOURCE = 0.7, 0.6
#: Comments that tools read.
PRAGMAS = ("# fmt", "# type:", "# noqa")


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def line_count(paths: Iterable[Path]) -> int:
    return sum(bool(line.strip()) for path in paths for line in path.read_text().splitlines())


def source_files() -> list[Path]:
    return [path for path in python_files("host", "rtl", "sim") if VERIFICATION not in path.parents]


def share_of_tests() -> float:
    return line_count(python_files("tests", "sim/nearflash/verify")) / line_count(source_files())


def share_of_abi_tests() -> float:
    return line_count(python_files("tests/abi")) / line_count(python_files("host/nearflash/abi"))


def comment_lines(path: Path) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return len({t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.string.startswith(PRAGMAS)})


def comment_share() -> float:
    paths = source_files()
    return sum(map(comment_lines, paths)) / line_count(paths)


def test_enough_tests():
    assert share_of_tests() >= TESTS_TO_SOURCE


def test_the_contract_is_tested_most():
    assert share_of_abi_tests() >= ABI_TESTS_TO_SOURCE


def test_pragmas_and_strings_are_no_comments(tmp_path: Path):
    path = tmp_path / "some.py"
    path.write_text('a = 1  # why\n# fmt: skip\nb = "# no"\n#: of c\nc = 2\n')
    assert comment_lines(path) == 2
    assert line_count([path]) == 5


def test_something_is_counted():
    """A folder that was renamed would make the shares mean nothing."""
    assert all(map(python_files, ("host", "rtl", "sim", "tests", "tests/abi", "host/nearflash/abi")))
    assert python_files("sim/nearflash/verify") and any(map(comment_lines, source_files()))


if __name__ == "__main__":
    print(f"tests : source      {share_of_tests():.3f}")
    print(f"tests : source, abi {share_of_abi_tests():.3f}")
    print(f"comments            {100 * comment_share():.1f} %")
