"""accelerate: prepare, accumulation and clipping, save_state and load_state, to the bit."""

import pytest
import torch
from accelerate import Accelerator

from nearflash.training import NearStorageAdamW
from nearflash.training.integrations.accelerate import save_snapshots
from nearflash.training.integrations.checkpoints import restore


@pytest.fixture
def train(rows, tmp_path):
    """Train steps [first, last); saved behind step `save`, resumed from `resume`."""

    def run(model, path, first, last, save=None, resume=None, prepared=True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = own = NearStorageAdamW(
            model.parameters(), lr=1e-2, path=path, extent_params=1024, resume=resume is not None
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if prepared:
            model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
            save_snapshots(accelerator, optimizer)
        if resume is not None:
            accelerator.load_state(str(resume))
        for step in range(first, last):
            for part in range(2):
                ids = torch.stack([row["input_ids"] for row in rows[8 * step + 4 * part :][:4]])
                with accelerator.accumulate(model):
                    loss = model(input_ids=ids, labels=ids).loss
                    if not prepared:
                        (loss / 2).backward()
                        if part == 0:
                            continue
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                    else:
                        accelerator.backward(loss)
                        if accelerator.sync_gradients:
                            accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            if save is not None and step + 1 == save:
                accelerator.save_state(str(tmp_path / "saved"))
        assert own.steps == last
        own.close()

    return run


def test_the_same_as_a_plain_loop(make_model, values, train, tmp_path):
    plain, prepared = make_model(), make_model()
    train(plain, tmp_path / "plain", 0, 3, prepared=False)
    train(prepared, tmp_path / "prepared", 0, 3)
    assert all(torch.equal(one, two) for one, two in zip(values(plain), values(prepared), strict=True))


def test_save_and_load(make_model, values, train, tmp_path):
    whole, resumed = make_model(), make_model()
    train(whole, tmp_path / "state", 0, 4, save=2)
    assert restore(tmp_path / "saved", tmp_path / "state") == 2
    train(resumed, tmp_path / "state", 2, 4, resume=tmp_path / "saved")
    assert all(torch.equal(one, two) for one, two in zip(values(whole), values(resumed), strict=True))
