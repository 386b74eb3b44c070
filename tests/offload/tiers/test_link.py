"""A link between two memories copies what it is asked to, and counts that; one memory has nothing to count."""

import pytest
import torch

from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink


@pytest.fixture
def apart():
    """A link to a memory of a processor's own, and what it counts."""
    ledger = Ledger()
    return DeviceLink("cpu", ledger.count_bytes, one_memory=False), ledger.links


def test_spans_alone_are_copied_and_counted(apart):
    link, links = apart
    buffer = link.buffer(100)
    assert buffer.memory.data_ptr() != buffer.host.data_ptr()
    buffer.host.fill_(1)
    buffer.memory.fill_(2)
    with link.filling(buffer):
        link.push("weights", buffer.host, buffer.memory, [(3, 10), (90, 100)])
    assert buffer.memory.nonzero().numel() == 100 and (buffer.memory == 1).nonzero().flatten().tolist() == [
        *range(3, 10), *range(90, 100)
    ]  # fmt: skip
    buffer.memory.fill_(7)
    link.pull("cache", buffer.memory, buffer.host, [(50, 51)])
    link.push("weights", buffer.host[:20], buffer.memory[:20])
    assert (buffer.host == 7).nonzero().flatten().tolist() == [50]
    assert links == {"weights host to gpu": 17 + 20, "cache gpu to host": 1}


def test_neighbours_are_one_copy(apart, monkeypatch):
    """In any order; those that lie apart are not joined."""
    link, links = apart
    copies, copy = [], torch.Tensor.copy_

    def note(self, *args, **options):
        copies.append(len(self))
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", note)
    buffer = link.buffer(1000)
    link.push("weights", buffer.host, buffer.memory, [(300, 400), (100, 200), (0, 100), (401, 500)])
    assert copies == [200, 100, 99] and links == {"weights host to gpu": 399}


def test_a_value_that_is_placed_is_a_copy(apart):
    link, links = apart
    value = torch.arange(5.0)
    placed = link.place("weights", value)
    value.zero_()
    assert placed.tolist() == [0, 1, 2, 3, 4] and links == {"weights host to gpu": 20}
    assert DeviceLink().place("weights", value) is value


def test_tensors_of_any_shape_and_stride_are_copied_whole(apart):
    link, links = apart
    far, host = torch.arange(24.0).view(2, 3, 4).mT, torch.zeros(2, 4, 5)[..., 1:4]
    with link.aside(link.mark()):
        link.pull("cache", far, host)
        link.push("cache", host[:1] + 1, far[1:])
    assert torch.equal(host, torch.arange(24.0).view(2, 3, 4).mT) and torch.equal(far[1], host[0] + 1)
    assert links == {"cache gpu to host": 96, "cache host to gpu": 48}


def test_a_staging_buffer_is_as_large_as_wanted(apart):
    buffer = apart[0].buffer(100, 30)
    assert (len(buffer.memory), len(buffer.host)) == (100, 30)


def test_in_one_memory_bytes_move_but_do_not_cross():
    ledger = Ledger()
    link = DeviceLink("cpu", ledger.count_bytes)
    buffer, elsewhere = link.buffer(10), torch.full((10,), 5, dtype=torch.uint8)
    with link.filling(buffer):
        link.push("cache", elsewhere, buffer.memory)
    assert (buffer.memory == 5).all() and not ledger.links
