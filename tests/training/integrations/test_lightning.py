"""Lightning's Trainer: its checkpoints with snapshots, and a run that goes on from one to the bit."""

import pytest
import torch

from nearflash.abi.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Train up to a step, from a checkpoint or from the beginning: the model's parameters and what was saved."""
    lightning = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed: make venv")
    from nearflash.training.examples.lightning import Bytes
    from nearflash.training.integrations.lightning import LightningSnapshots

    monkeypatch.chdir(tmp_path)
    rows = torch.randint(0, 256, (8, 65), generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(rows, batch_size=8)  # one batch an epoch: a loader begins again at a resume

    def train(steps, checkpoint=None, name="run", snapshots=True):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        saves = lightning.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [saves, LightningSnapshots(folder / "state", folder / "snapshots")] if snapshots else [saves]
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            gradient_clip_val=0.5, callbacks=callbacks,
        )  # fmt: skip
        module = Bytes(folder)
        trainer.fit(module, data, ckpt_path=checkpoint)
        return module

    return train


def test_a_run_resumes_from_an_earlier_checkpoint_to_the_bit(run, tmp_path):
    whole = run(6)
    saved = tmp_path / "run" / "step=4.ckpt"
    assert sorted(path.name for path in (tmp_path / "run" / "snapshots").iterdir()) == ["step-2", "step-4", "step-6"]
    again = run(6, saved)  # the state was at step 6
    assert again.losses == whole.losses[4:]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert again.trainer.optimizers[0].steps == 6
    with pytest.raises(StateError, match="must hold a snapshot of 1 files, not of 0"):
        run(6, saved, "elsewhere")


def test_a_checkpoint_without_a_snapshot_is_refused(run, tmp_path):
    run(2, snapshots=False, name="bare")
    with pytest.raises(StateError, match="must have been saved with a snapshot"):
        run(4, tmp_path / "bare" / "step=2.ckpt", "bare-again")


def test_the_example_goes_on(tmp_path, capsys):
    from nearflash.training.examples import lightning as example

    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 99)
    losses = []
    for _ in range(2):
        assert example.main([str(text), str(tmp_path / "run")]) == 0
        losses += map(float, capsys.readouterr().out.splitlines()[-1].split())
    assert len(losses) == 20 and losses[10] < losses[0] - 1
