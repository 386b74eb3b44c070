"""Build the documentation as a site: the Markdown files where they lie, and a page a package from its docstrings.

python .ci/docs.py: writes build/site; fails on a dead link or an unknown anchor (`mkdocs build --strict`, and a look at
every link of the site).
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
STAGE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
PUBLIC = {
    "Training": ["nearflash.training", "nearflash.training.step.settings", "nearflash.training.integrations"],
    "Generation": ["nearflash.inference", "nearflash.inference.attend", "nearflash.inference.generate",
                   "nearflash.inference.cache", "nearflash.inference.engines", "nearflash.inference.policy"],
    "Offloading": ["nearflash.offload", "nearflash.planning.policy"],
    "Weights": ["nearflash.weights", "nearflash.identity"],
    "Devices": ["nearflash.device", "nearflash.device.drivers"],
    "Storage": ["nearflash.storage", "nearflash.storage.state", "nearflash.storage.kv", "nearflash.storage.flash"],
    "Contract": ["nearflash.abi", "nearflash.abi.attention", "nearflash.abi.optimizers"],
    "Model": ["nearflash.model"],
    "Gateware": ["nearflash.gateware.top", "nearflash.gateware.update", "nearflash.gateware.attention",
                 "nearflash.gateware.nand", "nearflash.gateware.weights", "nearflash.gateware.gradients",
                 "nearflash.gateware.stream", "nearflash.gateware.bus", "nearflash.gateware.fp"],
}  # fmt: skip
"""Pages of the reference, and the packages on each."""


def stage() -> None:
    """Copy what git tracks of the documents to the same places below build/docs, and write the reference's pages."""
    shutil.rmtree(STAGE, ignore_errors=True)
    kinds = ("*.md", "docs/*", "hls/examples/*", "LICENSE")
    tracked = subprocess.run(["git", "ls-files", *kinds], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.split():
        if not name.startswith("tests/data/"):
            (STAGE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, STAGE / name)
    reference = STAGE / "reference"
    reference.mkdir()
    for page, packages in PUBLIC.items():
        text = "".join(f"\n::: {package}\n" for package in packages)
        (reference / f"{page.lower()}.md").write_text(f"# {page}\n{text}")


def dead_links() -> list[str]:
    """Links of the site's pages to what is not in it: mkdocs lets folders and files that are no pages pass."""
    dead = []
    for page in sorted(SITE.rglob("index.html")):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            target = page.parent / unquote(link)
            if not re.match(r"[a-z]+:|/", link) and not (target.is_file() or (target / "index.html").is_file()):
                dead.append(f"{page.relative_to(SITE)}: dead link to {link}")
    return dead


def main() -> int:
    """Stage, build and look at the links; returns 0, or mkdocs' exit code, or 1 for dead links."""
    stage()
    if code := subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=ROOT).returncode:
        return code
    dead = dead_links()
    print("\n".join(dead), end="\n" * bool(dead), file=sys.stderr)
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
