"""Layers on disk from two files at once: the same tokens, bytes as the ratio says, a failed file named by layer."""

import re

import pytest

from nearflash.abi.errors import CommandError, WeightsError
from nearflash.offload import OffloadedModel
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.weights import striped

POLICY = OffloadPolicy(3, 1, Shares(disk=1), Shares(gpu=1), Shares(gpu=1))
CHUNK = 4096


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(striped.Stripes.__init__, "__kwdefaults__", {
        **striped.Stripes.__init__.__kwdefaults__, "chunk_bytes": CHUNK,
    })  # fmt: skip


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / "a" / "weights", tmp_path / "b" / "weights"]


@pytest.fixture
def opened(paths):
    def open_(folder, ratio=(2, 1), policy=POLICY, **options):
        for path in paths:
            path.parent.mkdir(exist_ok=True)
        return OffloadedModel(folder, policy, weights_paths=paths, weights_ratio=ratio, **options)

    return open_


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens_and_bytes_by_drive(saved, prompts, opened, small_chunks, family):
    (folder, _), rows, said = saved(family), prompts(3), []
    with OffloadedModel(folder, POLICY) as model:
        alone = model.generate(rows, max_new_tokens=4)
    with opened(folder, announce=said.append) as model:
        done = model.generate(rows, max_new_tokens=4)
        first, second = model.bytes_by_path.values()
    assert done.tokens == alone.tokens and len(said) == 1
    assert done.report.link_bytes["weights disk to host"] == alone.report.link_bytes["weights disk to host"]
    if family == "llama":  # of a mixture many pieces here are smaller than chunks
        assert first / (first + second) == pytest.approx(2 / 3, rel=0.02)
    assert first + second >= done.report.link_bytes["weights disk to host"]


def test_compressed_weights_come_from_all_drives(compressed, prompts, opened, small_chunks):
    folder, rows = compressed("coded-bitmap", 16), prompts(3)
    with OffloadedModel(folder, POLICY) as model:
        expected = model.generate(rows, max_new_tokens=3).tokens
    with opened(folder, None) as model:
        assert model.generate(rows, max_new_tokens=3).tokens == expected
        first, second = model.bytes_by_path.values()
    assert first == pytest.approx(second, rel=0.02)


def test_a_failed_drive_is_named_with_layer_and_tensor(saved, prompts, opened, small_chunks, paths):
    folder, _ = saved("llama")
    with opened(folder) as model:
        model.generate(prompts(3), max_new_tokens=2)
        with paths[1].open("r+b") as part:
            part.truncate(1 << 17)
        with pytest.raises(
            WeightsError,
            match=rf"layer \d: .*'model\.layers\.\d.*', .* on {re.escape(str(paths[1]))}|"
            rf"layer \d: .*reading 'model\.layers\.\d.*' failed .* on {re.escape(str(paths[1]))}",
        ):
            model.generate(prompts(3), max_new_tokens=2)


def test_an_expand_device_reads_from_its_own_drive(saved, opened):
    with pytest.raises(CommandError, match="weights_paths must be left out with expand_device"):
        opened(saved("llama")[0], expand_device="model")
