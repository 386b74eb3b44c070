"""The same heads on every device of the attend kernel: the model's bits, and faults that stay with their heads."""

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat, PageEntry
from nearflash.abi.errors import AddressError, AlignmentError, CommandError, DeviceError
from nearflash.device.drivers.attend import attend
from nearflash.device.selftest.run import compare
from nearflash.model.attention.head import attend_repeated
from nearflash.model.attention.memory.settings import HeadSettings
from nearflash.model.attention.random_vectors import MODES, random_vector
from nearflash.model.attention.vectors import differences
from nearflash.sim.verilator.heads import place_heads as heads_placed

KERNEL = "attend"
PAGE = Mode.PAGE | Mode.PROBABILITY
SCALE = 0.18
OPTIONS = {"score_dims": 8, "top_k": 3, "local_window": 2, "group_tokens": 8, "block_tokens": 32}
HEADS = [
    (HeadSettings(Mode.DENSE | Mode.REFERENCE, 32, SCALE, reference=(2, 2)), 30, 2),
    (HeadSettings(PAGE, 32, SCALE, **OPTIONS), 100, 1),
    (HeadSettings(PAGE, 32, SCALE, index_format=IndexFormat.INT4, **OPTIONS), 120, 3),
    (HeadSettings(Mode(0), 32, SCALE, interleaved=True, **OPTIONS | {"top_k": 20}), 90, 2),
]


def vectors(seed=0):
    return [random_vector(*head, seed=seed + index, head=index) for index, head in enumerate(HEADS)]


@pytest.fixture
def placed(device):
    """Places cases in the device's memory; gives it back."""
    with ExitStack() as stack:
        yield lambda heads: stack.enter_context(heads_placed(device, heads, memory=True))


@pytest.mark.parametrize("contexts", [1, 4])
def test_heads_equal_the_model(device, placed, contexts):
    heads = vectors() + vectors(10)
    done = attend(device, placed(heads), contexts=contexts, repeats=0)
    for vector, one in zip(heads, done.heads, strict=True):
        assert not differences(vector, one.completion, one.out)
    assert done.batches[0].counters["heads_done"] == len(heads)


def test_self_test(device):
    rows = list(compare(device, seed=1, params=1, tokens=200, columns=1))
    assert {row.case.split()[0] for row in rows} == set(MODES)
    assert not sum(row.mismatches for row in rows)


def test_a_head_with_a_wrong_reference_is_computed_again(device, placed):
    heads = [
        replace(vector, settings=replace(vector.settings, reference=(r, r)))
        for vector, r in zip(vectors()[:1] * 2, (70, -70), strict=True)
    ]
    done = attend(device, placed(heads))
    assert len(done.batches) == 2
    for vector, one in zip(heads, done.heads, strict=True):
        wanted = attend_repeated(vector.q, vector.k, vector.v, vector.v_mean, vector.settings).out
        np.testing.assert_array_equal(one.value().view(np.uint16), wanted.view(np.uint16))


def faulty(device, placed, change):
    """Outputs of the four heads where the second one is changed; the others must be as ever."""
    heads = vectors()
    found = placed(heads)
    found[1] = change(found[1])
    done = attend(device, found, repeats=0)
    for index in (0, 2, 3):
        assert not differences(heads[index], done.heads[index].completion, done.heads[index].out)
    return done.heads[1]


def test_a_page_of_another_owner_is_never_used(device, placed):
    def swap(head):
        return replace(head, token_table=head.token_table[::-1].copy())

    one = faulty(device, placed, swap)
    assert one.completion.faults == Fault.MISDIRECTED
    with pytest.raises(DeviceError, match="MISDIRECTED: "):
        one.value()


def test_an_entry_that_the_build_does_not_have(device, placed):
    def lose(head):
        table = head.token_table.copy()
        table[-1] = PageEntry(channel=9, address=64).pack()
        return replace(head, token_table=table)

    assert faulty(device, placed, lose).completion.faults & Fault.ENTRY


def test_a_descriptor_out_of_range(device, placed):
    def spoil(head):
        return replace(head, descriptor=replace(head.descriptor, block_tokens=33))

    one = faulty(device, placed, spoil)
    assert (one.completion.faults, one.completion.entries, one.completion.pages) == (Fault.DESCRIPTOR, 0, 0)


def test_an_infinity_in_q(device, placed):
    def spoil(head):
        q = head.q.copy()
        q[0, 5] = np.inf
        return replace(head, q=q)

    assert faulty(device, placed, spoil).completion.faults == Fault.NONFINITE


def test_bad_batches_leave_memory_as_it_was(device, placed):
    (head,) = placed(vectors()[:1])
    buffer = device.allocate(1 << 14)
    buffer.host[:] = np.random.default_rng(3).integers(0, 256, 1 << 14, np.uint8)
    buffer.sync_to_device()
    before, a = buffer.host.copy(), buffer.address
    descriptor = replace(head.descriptor, q_address=a, v_mean_address=a, out_address=a + 4096)
    good = AttendBatch((descriptor,), a + 8192, a + 8192 + 128, contexts=4)
    bad = {
        AddressError: (replace(good, descriptors_address=1 << 40), replace(good, completions_address=a + 8192),
                       replace(good, descriptors=(replace(descriptor, out_address=a + 8),))),
        AlignmentError: (replace(good, descriptors_address=a + 8192 + 8),),
        CommandError: (replace(good, descriptors=()), replace(good, contexts=3)),
    }  # fmt: skip
    for error, batches in bad.items():
        for batch in batches:
            with pytest.raises(error):
                device.submit(batch)
    buffer.sync_from_device()
    np.testing.assert_array_equal(buffer.host, before)
    device.free(buffer)
