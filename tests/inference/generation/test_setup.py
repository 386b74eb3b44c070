from pathlib import Path

import numpy as np
import pytest

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, ConfigError, DeviceLostError, StorageFullError, UnknownDeviceError
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import default_layout, open_engine
from nearflash.storage.kv import KvLayout, KvShape

SHAPE = KvShape(layers=2, kv_heads=4, dim=32)
PAGE = AttentionPolicy("sparf-page", score_dims=0.5, top_k=0.5, local_window=8)


def fill(engine, sequences, tokens, seed=3):
    rng = np.random.default_rng(seed)
    numbers = [engine.add() for _ in range(sequences)]
    for number in numbers:
        for layer in range(SHAPE.layers):
            engine.append(number, layer, *rng.standard_normal((2, 4, tokens, 32)).astype(np.float16))
    return numbers


@pytest.mark.parametrize("policy", [AttentionPolicy(), AttentionPolicy("sparf", local_window=4), PAGE])
@pytest.mark.parametrize("device", ["cpu", "model:attend-tiny"])
def test_there_is_room_for_what_was_asked(device, policy):
    with open_engine(SHAPE, policy, tokens=100, sequences=3, device=device) as engine:
        numbers = fill(engine, 3, 100)
        out = engine.attend(1, numbers, np.ones((3, 4, 1, 32), np.float16))
        assert np.isfinite(out).all()


def test_devices_share_the_heads_and_give_the_same(tmp_path):
    q = np.random.default_rng(5).standard_normal((2, 4, 2, 32)).astype(np.float16)
    outs = []
    layout = KvLayout(8, True, 32, IndexFormat.INT4, 4096)
    for devices in (1, 2, 4):
        path = tmp_path / f"kv{devices}"
        with open_engine(SHAPE, PAGE, tokens=200, sequences=2, num_devices=devices, path=path, layout=layout) as engine:
            outs.append(engine.attend(0, fill(engine, 2, 200), q))
    assert np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "kv1",
        *(f"kv2.{i}" for i in range(2)),
        *(f"kv4.{i}" for i in range(4)),
    ]


def test_files_on_several_drives_share_the_heads_by_their_ratio(tmp_path):
    """As one file does; of a drive that fails, file and heads are named."""
    q = np.random.default_rng(5).standard_normal((2, 4, 2, 32)).astype(np.float16)
    files = [tmp_path / name for name in ("a", "b")]
    layout = KvLayout(8, True, 32, IndexFormat.INT4, 4096)
    options = {"tokens": 200, "sequences": 2, "layout": layout}
    with open_engine(SHAPE, PAGE, path=tmp_path / "one", **options) as engine:
        expected = engine.attend(0, fill(engine, 2, 200), q)
    with open_engine(SHAPE, PAGE, path=files, stripe_ratio=[3, 1], **options) as engine:
        assert [len(heads) for heads in engine.heads] == [3, 1]
        numbers = fill(engine, 2, 200)
        assert np.array_equal(engine.attend(0, numbers, q), expected)
        engine.engines[1].store.append = fail
        with pytest.raises(DeviceLostError, match=rf"cpu on {files[1]}\) with KV heads \[3, 4\)"):
            engine.append(numbers[0], 0, *np.zeros((2, 4, 1, 32), np.float16))


def fail(*_):
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": ["cpu", "cpu"], "num_devices": 2}, "num_devices must be 1 where 2 devices are named, not 2"),
        ({"path": [Path("a"), Path("b")], "num_devices": 3}, "path must be one, or one for each device, not 2"),
        ({"path": [Path("a"), Path("b")], "stripe_ratio": [1]}, "stripe_ratio must have a number for each of 2"),
    ],
)
def test_lists_that_do_not_go_together(given, message):
    with pytest.raises(CommandError, match=message):
        open_engine(SHAPE, PAGE, tokens=8, sequences=1, **given)


@pytest.mark.parametrize("policy", [PAGE, AttentionPolicy("sparf", score_dims=0.5, top_k=0.25, local_window=4)])
def test_pages_on_nand_give_the_bits_of_pages_in_memory(policy):
    q = np.random.default_rng(5).standard_normal((2, 4, 2, 32)).astype(np.float16)
    outs = []
    for pages in (0, 64):
        options = {"tokens": 300, "sequences": 2, "device": "model:attend-tiny", "nand_block_pages": pages}
        with open_engine(SHAPE, policy, **options) as engine:
            outs.append(engine.attend(1, fill(engine, 2, 300), q))
    assert np.array_equal(*outs)


def test_a_full_flash_is_an_error(tmp_path):
    with open_engine(SHAPE, AttentionPolicy(), tokens=8, sequences=1, path=tmp_path / "kv") as engine:
        with pytest.raises(StorageFullError):
            fill(engine, 40, 2000)


def test_what_does_not_go_together_is_refused(tmp_path):
    with pytest.raises(CommandError, match="path must be left out with nand_block_pages: pages of 'model:attend-tiny'"):
        place = dict(device="model:attend-tiny", path=tmp_path / "kv", nand_block_pages=64)
        open_engine(SHAPE, PAGE, tokens=8, sequences=1, **place)
    with pytest.raises(CommandError, match="nand_block_pages must be 0 with device cpu, which has no NAND, not 64"):
        open_engine(SHAPE, PAGE, tokens=8, sequences=1, nand_block_pages=64)
    with pytest.raises(
        UnknownDeviceError, match=r"device must be one of bit, model, .*attend-tiny.*, not 'model:update-tiny'"
    ):
        open_engine(SHAPE, PAGE, tokens=8, sequences=1, device="model:update-tiny")
    with pytest.raises(ConfigError, match=r"devices must be 1 to 4 \(the KV heads\)"):
        open_engine(SHAPE, PAGE, tokens=8, sequences=1, num_devices=5)
    with pytest.raises(UnknownDeviceError):
        open_engine(SHAPE, PAGE, tokens=8, sequences=1, device="model:attend-huge")


@pytest.mark.parametrize("mode", ["dense", "sparq", "sparf", "sparf-page"])
@pytest.mark.parametrize("dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [1, 100, 4096, 1 << 17])
def test_the_layout_fits(mode, dim, tokens):
    layout = default_layout(dim, AttentionPolicy(mode), tokens)
    assert layout.token_layout(dim).tokens == layout.group_tokens
    assert layout.index_layout(dim).row_codewords == 1 and layout.block_tokens % layout.group_tokens == 0
    assert layout.interleaved == (mode in ("dense", "sparf-page"))
