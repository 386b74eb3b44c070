"""A state tells which optimizer made it."""

import pytest
import torch

from nearflash.abi.errors import StateError, UnmarkedStateWarning
from nearflash.storage import StateStore
from nearflash.training import NearStorageAdam, NearStorageAdamW, NearStorageLion, NearStorageMuon, NearStorageSGD


@pytest.mark.parametrize(
    ("stored", "wanted"), [("adam", "adamw"), ("adamw", "adam"), ("lion", "muon"), ("muon", "lion")]
)
def test_optimizers_of_the_same_arrays_do_not_take_each_others_state(tmp_path, stored, wanted):
    """Each took it silently, and its decay, or its step, was not that of the run from then on."""
    kinds = {"adam": NearStorageAdam, "adamw": NearStorageAdamW, "lion": NearStorageLion, "muon": NearStorageMuon}
    tensors = [torch.nn.Parameter(torch.ones(8, 8))]
    with kinds[stored](tensors, path=tmp_path / "state") as optimizer:
        tensors[0].grad = torch.ones(8, 8)
        optimizer.step()
        optimizer.store.snapshot(tmp_path / "copy")
    before = (tmp_path / "state").read_bytes()
    refused = f"optimizer must be '{stored}', which made the state of {tmp_path}.*, not '{wanted}': take that one"
    with pytest.raises(StateError, match=refused):
        kinds[wanted](tensors, path=tmp_path / "state", resume=True)
    assert (tmp_path / "state").read_bytes() == before
    with (
        kinds[wanted](tensors, path=tmp_path / "other") as optimizer,
        pytest.raises(StateError, match=refused),
    ):
        optimizer.restore(tmp_path / "copy")
    with kinds[stored](tensors, path=tmp_path / "state", resume=True) as optimizer:
        assert optimizer.steps == 1 and optimizer.metadata == {}


def test_a_state_without_a_mark_is_taken_with_one_line(tmp_path, monkeypatch):
    """Version 0.3 marked none: its content does not tell, so the caller's word counts, and from the next step on no
    other optimizer's does. A state without a step has nothing that another could take wrongly."""
    tensors = [torch.nn.Parameter(torch.ones(8, 8))]
    with monkeypatch.context() as patch:
        patch.setattr(NearStorageSGD, "_name", "")
        with NearStorageSGD(tensors, momentum=0.9, path=tmp_path / "state") as optimizer:
            optimizer.store.snapshot(tmp_path / "new")
            tensors[0].grad = torch.ones(8, 8)
            optimizer.step()
    with StateStore.open(tmp_path / "state") as store:
        assert store.metadata == {}
    NearStorageSGD(tensors, momentum=0.9, path=tmp_path / "new" / "state", resume=True).close()
    taken = f"{tmp_path / 'state'} has no mark of the optimizer that made it, .*: 'sgd' is taken for it, and marks it"
    with pytest.warns(UnmarkedStateWarning, match=taken) as noticed:
        optimizer = NearStorageSGD(tensors, momentum=0.9, path=tmp_path / "state", resume=True)
    assert len(noticed) == 1
    with optimizer:
        optimizer.step()
    NearStorageSGD(tensors, momentum=0.9, path=tmp_path / "state", resume=True).close()
    with pytest.raises(StateError, match="optimizer must be 'sgd'"):
        NearStorageLion(tensors, path=tmp_path / "state", resume=True)
