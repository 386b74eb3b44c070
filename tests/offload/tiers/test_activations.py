"""Hidden states that wait elsewhere come back as they were, in the same tensor."""

import pytest
import torch

from nearflash.abi.errors import StateError
from nearflash.offload.tiers.activations import Parked
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink, host_memory
from nearflash.storage.io.direct import DirectFile


@pytest.fixture
def parked(tmp_path):
    ledger = Ledger()
    with DirectFile.create(tmp_path / "file", 64 << 10) as file:
        yield Parked("disk", DeviceLink(), ledger, file, offset_bytes=8192, room_bytes=32 << 10), ledger


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 64), (4, 16, 64)])
def test_they_come_back(parked, dtype, shape):
    place, ledger = parked
    states = torch.randn(shape).to(dtype)
    kept, size = states.clone(), states.numel() * states.element_size()
    alias = states.view(-1)
    for _ in range(2):
        place.park(states)
        assert states.untyped_storage().nbytes() == 0
        place.restore()
        assert torch.equal(states, kept) and torch.equal(alias, kept.view(-1))
    blocks = -(-size // 4096) * 4096
    assert ledger.links == {"activations host to disk": 2 * blocks, "activations disk to host": 2 * blocks}


def test_other_bytes_than_were_written_are_an_error(tmp_path):
    with DirectFile.create(tmp_path / "file", 64 << 10) as file:
        places = [Parked("disk", DeviceLink(), Ledger(), file, place, 32 << 10) for place in (0, 32 << 10)]
        for place in places:
            place.park(torch.randn(4, 16, 64))
        block = host_memory(4096).numpy()
        file.read(36 << 10, block)
        file.write(4 << 10, block)
        with pytest.raises(StateError, match="hidden states must be those that were written, but bytes 0 to 16384"):
            places[0].restore()
        places[1].restore()


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
    place, states = Parked(tier, DeviceLink(), ledger), torch.randn(2, 3, 4)
    place.park(states)
    assert states.untyped_storage().nbytes() == states.numel() * 4
    place.restore()
    assert not ledger.links
