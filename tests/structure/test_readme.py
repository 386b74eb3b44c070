"""README: short, its snippets run, its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    for top in ("docs", "host", "rtl", "sim", "hls", "tests"):
        found += sorted((ROOT / top).rglob("*.md"))
    return found


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_at_most_120_lines():
    assert len(README.splitlines()) <= 120


def test_readme_has_three_snippets():
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[re.findall(r"nearflash\.(\w+)", code)[0] for code in SNIPPETS])
def test_snippets_of_the_readme_run(snippet, tmp_path):
    assert not re.search(r"nearflash\.(model|device\.selftest)\b", snippet), "public imports only"
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


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
