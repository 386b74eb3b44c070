"""Hidden states that wait elsewhere come back as they were, in the same tensor."""

from contextlib import closing
from threading import Event

import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.offload.tiers.activations import Parked, StatesFile
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink, host_memory
from nearflash.storage.io.direct import DirectFile


def open_states(file, ledger=None, **options):
    return closing(StatesFile(file, DeviceLink(), ledger or Ledger(), **options))


@pytest.fixture(params=[True, False], ids=["overlap", "in turn"])
def parked(tmp_path, request):
    ledger = Ledger()
    with (
        DirectFile.create(tmp_path / "file", 64 << 10) as file,
        open_states(file, ledger, overlap=request.param) as states,
    ):
        yield Parked("disk", DeviceLink(), states, offset_bytes=8192, room_bytes=32 << 10), ledger


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 64), (4, 16, 64)])
def test_they_come_back(parked, dtype, shape):
    place, ledger = parked
    states = torch.randn(shape).to(dtype)
    kept, size = states.clone(), states.numel() * states.element_size()
    alias = states.view(-1)
    for ahead in (False, True):
        place.park(states)
        if ahead:
            place.begin()
        assert states.untyped_storage().nbytes() == 0
        place.restore()
        assert torch.equal(states, kept) and torch.equal(alias, kept.view(-1))
    blocks = -(-size // 4096) * 4096
    assert ledger.links == {"activations host to disk": 2 * blocks, "activations disk to host": 2 * blocks}


def test_other_bytes_than_were_written_are_an_error(tmp_path):
    with DirectFile.create(tmp_path / "file", 64 << 10) as file, open_states(file) as states:
        places = [Parked("disk", DeviceLink(), states, place, 32 << 10) for place in (0, 32 << 10)]
        for place in places:
            place.park(torch.randn(4, 16, 64))
            place.wait_until_written()
        block = host_memory(4096).numpy()
        file.read(36 << 10, block)
        file.write(4 << 10, block)
        with pytest.raises(StateError, match="hidden states must be those that were written, but bytes 0 to 16384"):
            places[0].restore()
        places[1].restore()


def test_one_batch_is_read_ahead_and_one_written_behind(tmp_path, monkeypatch):
    """What computes waits for neither, until there are two of a kind."""
    with DirectFile.create(tmp_path / "file", 64 << 10) as file, open_states(file) as states:
        places = [Parked("disk", DeviceLink(), states, place, 32 << 10) for place in (0, 32 << 10)]
        batches = [torch.randn(4, 16, 64) for _ in places]
        kept, go_on = [batch.clone() for batch in batches], Event()
        for name in ("read", "write"):
            call = getattr(file, name)
            monkeypatch.setattr(file, name, lambda *args, call=call: (go_on.wait(60), call(*args)))
        places[0].park(batches[0])
        places[0].begin()
        places[1].begin()  # it has nothing there
        assert batches[0].untyped_storage().nbytes() == 0
        go_on.set()
        places[0].restore()
        assert torch.equal(batches[0], kept[0])
        places[1].park(batches[1])
        places[1].restore()
        assert torch.equal(batches[1], kept[1])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_write_is_raised_where_they_are_restored(tmp_path, monkeypatch, overlap):
    with DirectFile.create(tmp_path / "file", 64 << 10) as file, open_states(file, overlap=overlap) as states:
        place = Parked("disk", DeviceLink(), states, 0, 32 << 10)

        def fail(*args):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(file, "write", fail)
        with pytest.raises(OSError, match="Input/output error"):
            place.park(torch.randn(4, 16, 64))
            place.restore()


def test_what_is_larger_than_its_room_stays(parked):
    place, ledger = parked
    states = torch.randn(1, 64, 256)
    place.park(states)
    assert states.untyped_storage().nbytes() == states.numel() * 4
    place.restore()
    assert not ledger.links


def test_a_part_of_a_larger_tensor_stays(parked):
    """Its memory is others', too."""
    place, ledger = parked
    whole = torch.randn(4, 3, 8)
    for part in (whole[1:3], whole[:, 1:2]):
        place.park(part)
        assert whole.untyped_storage().nbytes() == whole.numel() * 4
    place.park(None)
    place.park(torch.empty(0, 3))
    place.restore()
    assert not ledger.links


@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_a_cpus_states_stay_in_the_hosts_memory(tier):
    ledger = Ledger()
    place, states = Parked(tier, DeviceLink("cpu", ledger.count_bytes)), torch.randn(2, 3, 4)
    place.park(states)
    assert states.untyped_storage().nbytes() == states.numel() * 4
    place.restore()
    assert not ledger.links
