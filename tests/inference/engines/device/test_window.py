"""A device whose window holds fewer pages than there are gives what one gives that has them all."""

import numpy as np
import pytest

from nearflash.abi.errors import DeviceLostError, PageError
from nearflash.device import open_device
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.engines.device.window import WindowEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import open_engine
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.window import WindowFlash, slot_bytes
from nearflash.storage.kv import KvStore

PAGE = AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, local_window=8)
POLICIES = {
    "page": PAGE,
    "mass": AttentionPolicy("sparf-page", score_dims=0.25, top_k=0.25, top_p=0.9, local_window=4),
    "tokens": AttentionPolicy("sparf", score_dims=0.5, top_k=6, local_window=4),
    "mixed": AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.25, overrides={(1, 2): PAGE}),
}
LENGTHS = [200, 139, 64, 9]
SPEC = "model:attend-pynq-z2"


@pytest.fixture
def make_engine(shape, tmp_path):
    engines = []

    def make(policy, layout, slots=None, suffix_bytes=0):
        device = open_device(SPEC)
        geometry = FlashGeometry(layout.page_bytes, 32, device.identity.config.channels, 2, 48)
        if slots is None:
            engines.append(DeviceEngine(device, KvStore(MemoryFlash(device, geometry), shape, layout), policy))
        else:
            path = tmp_path / f"drive{len(engines)}"
            flash = WindowFlash(device, path, geometry, slots * slot_bytes(layout.page_bytes), direct=False)
            engines.append(WindowEngine(device, KvStore(flash, shape, layout, suffix_bytes=suffix_bytes), policy))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("suffix_bytes", [0, 1 << 20])
@pytest.mark.parametrize("name", POLICIES)
def test_outputs_are_those_of_a_device_with_room_for_all(
    make_engine, make_layout, shape, filled, draw_q, name, suffix_bytes
):
    layout = make_layout()
    whole, window = make_engine(POLICIES[name], layout), make_engine(POLICIES[name], layout, 80, suffix_bytes)
    outs = []
    for engine in (whole, window):
        numbers, _ = filled(engine, shape, LENGTHS)
        outs.append([engine.attend(1, numbers, draw_q(shape, len(LENGTHS), 2, seed), 0.2) for seed in (3, 4)])
    assert np.array_equal(*outs)
    assert window.counters.flash_bytes["window"] > 0 and "codeword" not in window.counters.flash_bytes


def test_pages_that_are_still_there_are_not_read_again(make_engine, make_layout, shape, filled, draw_q):
    engine = make_engine(PAGE, make_layout(), 200)
    numbers, _ = filled(engine, shape, [139])
    q = draw_q(shape, 1, 2)
    first = engine.attend(1, numbers, q)
    read = engine.counters.flash_bytes["window"]
    assert np.array_equal(engine.attend(1, numbers, q), first) and engine.counters.flash_bytes["window"] == read > 0


def test_a_forked_and_a_cropped_sequence_find_their_pages(make_engine, make_layout, shape, filled, draw_q):
    outs, layout, q = [], make_layout(), draw_q(shape, 1, 2)
    for engine in (make_engine(PAGE, layout), make_engine(PAGE, layout, 80)):
        ((number,), _) = filled(engine, shape, [139])
        engine.append(number, 0, *np.ones((2, shape.kv_heads, 139, shape.dim), np.float16))
        engine.attend(1, [number], q)
        other = engine.fork(number)
        engine.append(other, 1, *np.ones((2, shape.kv_heads, 40, shape.dim), np.float16))
        outs.append([engine.attend(1, [other], q), engine.attend(1, [number], q)])
        engine.free(number)
        numbers, _ = filled(engine, shape, [200, 100])  # in blocks that are used again
        outs[-1] += [engine.attend(1, [one], q) for one in (other, *numbers)]
    assert np.array_equal(*outs)


def test_a_damaged_page_on_the_drive_is_named(make_engine, make_layout, shape, filled, draw_q):
    engine = make_engine(PAGE, make_layout(), 80)
    numbers, _ = filled(engine, shape, [139])
    engine.store.flush()
    flash = engine.store.flash
    row = flash._rows(1)
    for page in np.unique(engine.store.layer(numbers[0], 1).token_pages[:, :16]).tolist():  # indexed
        flash._file.read(page * row.size, row[0])
        row[0, 40] ^= 1
        flash._file.write(page * row.size, row[0])
    with pytest.raises(PageError, match=r"sequence 0, layer 1, head 0: .* MISDIRECTED"):
        engine.attend(1, numbers, draw_q(shape, 1, 2))


def test_a_drive_that_fails_is_named_with_its_heads(make_layout, shape, filled, draw_q, tmp_path):
    options = dict(tokens=256, sequences=1, layout=make_layout(), cache_bytes=200 * slot_bytes(4096))
    with open_engine(shape, PAGE, device=[SPEC, SPEC], path=tmp_path / "kv", **options) as array:
        numbers, _ = filled(array, shape, [139])
        array.engines[1]._flash._file.close()
        with pytest.raises(
            DeviceLostError, match=r"device 1 .* with KV heads \[2, 3\) .*kv\.1 .*lost: KV of sequences"
        ):
            array.attend(1, numbers, draw_q(shape, 1, 2))
