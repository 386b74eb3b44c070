"""Build the documentation as a site: the Markdown files where they lie, and a page a package from its docstrings.

python .ci/docs.py: writes build/site; fails on a dead link or an unknown anchor (`mkdocs build --strict`).
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGE = ROOT / "build" / "docs"
PUBLIC = {
    "Training": ["nearflash.training", "nearflash.training.step.settings", "nearflash.training.integrations"],
    "Generation": ["nearflash.inference", "nearflash.inference.attend", "nearflash.inference.generate",
                   "nearflash.inference.cache", "nearflash.inference.engines", "nearflash.inference.policy"],
    "Weights": ["nearflash.weights"],
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
    kinds = ("*.md", "docs/*", "LICENSE")
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


def main() -> int:
    """Stage and build; returns mkdocs' exit code."""
    stage()
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
