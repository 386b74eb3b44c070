"""Counts of routed experts in a file beside the model."""

import json
import os
import stat

import pytest

from nearflash.abi.errors import StateError
from nearflash.offload import OffloadedModel, generate
from nearflash.offload.weights.experts.counts import COUNTS_FILE


def test_counts_are_kept_beside_the_model(mixture, prompts, expert_buffer, policy):
    folder, _ = mixture("mixtral")
    size = expert_buffer(folder)
    rows = prompts(3)
    generate(folder, rows, policy(), max_new_tokens=6, stop_tokens=[], expert_bytes=4 * size)
    file = folder / COUNTS_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    found = json.loads(file.read_text())
    tokens = sum(3 * max(map(len, rows)) if step == 0 else 3 for step in range(6))
    assert [sum(row) for row in found["counts"]] == [2 * tokens] * 4, (
        "two of each token, padding included, in each layer"
    )
    generate(folder, rows, policy(), max_new_tokens=6, stop_tokens=[], expert_bytes=4 * size)
    again = json.loads(file.read_text())
    assert sum(map(sum, again["counts"])) > sum(map(sum, found["counts"])), "half of the old ones, and the new ones"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "readable JSON file .*: remove it"), ('{"layers": []}', "must be an object"), (
        '{"layers": [[0, 8], [1, 8], [2, 8], [3, 8]], "counts": [[1]]}', "must have 4 rows")]
)  # fmt: skip
def test_damaged_counts_are_reported(mixture, prompts, text, message, policy):
    folder, _ = mixture("mixtral")
    (folder / COUNTS_FILE).write_text(text)
    with pytest.raises(StateError, match=message):
        OffloadedModel(folder, policy(), expert_bytes=1 << 20)


def test_counts_of_other_layers_are_not_used(mixture, prompts, policy):
    folder, _ = mixture("mixtral")
    (folder / COUNTS_FILE).write_text('{"layers": [[0, 8]], "counts": [[1, 1, 1, 1, 1, 1, 1, 1]]}')
    with OffloadedModel(folder, policy(), expert_bytes=1 << 20) as model:
        assert not model.experts.counts._counts


def test_counts_are_not_written_through_a_link(mixture, prompts, tmp_path, policy):
    folder, _ = mixture("mixtral")
    (tmp_path / "other").write_text("mine")
    for name in (COUNTS_FILE, f"{COUNTS_FILE}.{os.getpid()}"):
        (folder / name).symlink_to(tmp_path / "other")
    (folder / COUNTS_FILE).unlink()
    generate(folder, prompts(2), policy(), max_new_tokens=2, expert_bytes=1 << 20)
    assert (tmp_path / "other").read_text() == "mine" and not (folder / COUNTS_FILE).is_symlink()
    assert (folder / COUNTS_FILE).stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_written_to_keeps_no_counts(mixture, prompts, monkeypatch, policy):
    folder, _ = mixture("mixtral")
    original = os.open

    def refused(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and str(path).startswith(str(folder)):
            raise PermissionError(13, "Permission denied")
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refused)
    generate(folder, prompts(2), policy(), max_new_tokens=2, expert_bytes=1 << 20)
    assert not (folder / COUNTS_FILE).exists()
