"""README: short, its snippets run, its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

from nearflash.verify.fixtures.forked import ForkedProgram

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
    for top in ("docs", "host", "rtl", "sim", "hls", "tests", "bitstreams"):
        found += sorted((ROOT / top).rglob("*.md"))
    return found


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def families() -> set[str]:
    """Model types whose tokens, with the KV cache on flash, tests compare with transformers' own."""
    found: set[str] = set()
    for test, pick in (("inference/generation/test_decoders.py", "values"), ("cli/test_folders.py", "keys")):
        for node in ast.parse((ROOT / "tests" / test).read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES":
                names = [getattr(each, "elts", [each])[0] for each in getattr(node.value, pick)]
                found |= {each.value.lower().replace("_", "") for each in names}
    return found - {"falcon"}  # generates by a plan, but its attention is code of its own: not on flash


def test_families_are_as_many_as_tests_compare():
    guide = (ROOT / "docs/guides/kv-cache.md").read_text()
    assert f"full-attention decoders of [{len(families())} families]" in README
    listed = re.search(
        rf"Full-attention decoders of {len(families())} families are tested.*?: (.*?);", guide, re.DOTALL
    )
    assert listed and len(re.split(r",\s+|\s+and\s+", listed[1])) == len(families())


@pytest.mark.parametrize("guide", ["training", "kv-cache", "offload"])
def test_guides_begin_with_what_is_not_supported(guide):
    headings = re.findall(r"^## (.*)$", (ROOT / f"docs/guides/{guide}.md").read_text(), re.MULTILINE)
    assert headings[0] == "What is not supported"


def test_changelog_of_the_newest_versions_is_short():
    assert len(re.split(r"(?m)^## ", (ROOT / "CHANGELOG.md").read_text(), maxsplit=3)[1:3]) == 2
    assert max(len(part.splitlines()) for part in re.split(r"(?m)^## ", (ROOT / "CHANGELOG.md").read_text())[1:3]) <= 60


def test_readme_has_three_snippets():
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[re.findall(r"nearflash\.(\w+)", code)[0] for code in SNIPPETS])
def test_snippets_of_the_readme_run(snippet, tmp_path):
    assert not re.search(r"nearflash\.(model|device\.selftest)\b", snippet), "public imports only"
    program = ForkedProgram(f"import os\nos.chdir({str(tmp_path)!r})\n{snippet}")
    _, errors = program.communicate(600)
    assert program.returncode == 0, errors


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert not dead
