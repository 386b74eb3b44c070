"""A fresh user's path, as hls/README.md has it: AMSGrad written, checked, estimated, and trained with."""

import importlib.util
import re
import shlex

import numpy as np
import pytest

from nearflash.cli.main import main
from nearflash.sim.hls.build import HLS

EXAMPLES = HLS / "examples"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (HLS / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def code_lines(text: str) -> int:
    """Lines that are neither blank nor a comment or docstring of one line."""
    return sum(
        bool(line.strip()) and not line.strip().startswith(("//", '"""', "#pragma")) for line in text.splitlines()
    )


def test_the_path_of_the_readme_works(tmp_path, monkeypatch, capsys):
    start, rest = (block.splitlines() for block in blocks("sh"))
    monkeypatch.chdir(tmp_path)
    texts = dict(zip(("amsgrad.hpp", "amsgrad.py"), (blocks("cpp")[0], blocks("python")[0]), strict=True))
    assert code_lines(texts["amsgrad.hpp"]) < 40 and code_lines(texts["amsgrad.py"]) <= 20
    for command in start:
        assert main(shlex.split(command)[1:]) == 0
    for name, text in texts.items():
        assert text == (EXAMPLES / name).read_text()
        assert (tmp_path / name).exists(), "new writes it first"
        (tmp_path / name).write_text(text)
    for command in rest:
        assert main(shlex.split(command)[1:]) == 0, command
    output = capsys.readouterr().out
    assert "Amsgrad: 12 cases, 3,145,728 words compared, 0 mismatches" in output
    shown = re.search(r"^    Amsgrad on .*\n(?:^    .*\n)+", (HLS / "README.md").read_text(), re.MULTILINE)[0]
    assert "".join(line[4:] + "\n" for line in shown.splitlines()) in output, "what analyze prints must be as shown"
    assert (tmp_path / "update_amsgrad.cpp").read_text().count("NEARFLASH_STAGE(load(") == 5


def test_training_with_it_on_the_device_follows_torchs_own(tmp_path):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("train_amsgrad", EXAMPLES / "train_amsgrad.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    ours, theirs = example.train_on_device(40, tmp_path), example.train_in_torch(40)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[-1] < ours[0] - 0.01
