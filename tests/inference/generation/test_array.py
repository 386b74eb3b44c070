import numpy as np
import pytest

from nearflash.abi.errors import ConfigError, DeviceLostError, PageError, ShapeError, StateError, StorageFullError
from nearflash.inference.cache.cache import NearflashCache
from nearflash.inference.engines.array import CsdArray, split_heads


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float16)


@pytest.fixture
def make_array(make_engine):
    opened = []

    def make(*heads):
        opened.append(CsdArray([make_engine(n, f"csd{i}") for i, n in enumerate(heads)]))
        return opened[-1]

    yield make
    for array in opened:
        array.close()


@pytest.fixture
def filled(make_array):
    """An array of 1 + 3 heads with two sequences of five tokens."""
    array, rng = make_array(1, 3), np.random.default_rng(1)
    for _ in range(2):
        array.append(array.add(), 0, draw(rng, 4, 5, 8), draw(rng, 4, 5, 8))
    return array


@pytest.mark.parametrize(
    ("kv_heads", "weights", "heads"),
    [(8, [1, 1], [4, 4]), (8, [1, 1, 1], [3, 3, 2]), (8, [3, 1], [6, 2]), (3, [10, 1, 1], [1, 1, 1]), (7, [2.5], [7])],
)
def test_heads_go_by_weight(kv_heads, weights, heads):
    assert split_heads(kv_heads, weights) == heads


@pytest.mark.parametrize(("kv_heads", "weights"), [(2, [1, 1, 1]), (2, []), (2, [1, 0]), (2, [1, -1])])
def test_devices_without_heads_are_refused(kv_heads, weights):
    with pytest.raises(ConfigError, match="devices must be 1 to 2"):
        split_heads(kv_heads, weights)
    with pytest.raises(ConfigError, match="engines must be at least one"):
        CsdArray([])


@pytest.mark.parametrize("heads", [(4,), (1, 3), (1, 1, 1, 1)])
def test_outputs_are_those_of_one_engine(make_array, make_engine, heads):
    rng = np.random.default_rng(2)
    one, array = make_engine(4), make_array(*heads)
    for engine in (one, array):
        engine.add()
    numbers = [(one.add(), array.add()) for _ in range(2)]
    for single, several in numbers:
        k, v = draw(rng, 4, 7, 8), draw(rng, 4, 7, 8)
        one.append(single, 3, k, v)
        array.append(several, 3, k, v)
    q = rng.standard_normal((2, 4, 2, 8)).astype(np.float16)
    singles, severals = zip(*numbers, strict=True)
    assert np.array_equal(array.attend(3, severals, q, 0.5), one.attend(3, singles, q, 0.5))
    assert array.counters.heads == one.counters.heads == 8
    assert array.counters.flash_bytes == one.counters.flash_bytes


def test_generated_tokens_do_not_depend_on_the_devices(make_model, make_array):
    import torch

    model = make_model(heads=8, kv_heads=8)
    ids = torch.arange(2, 26).reshape(3, 8)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    tokens = []
    for heads in ((8,), (4, 4), (2, 2, 2, 2)):
        array = make_array(*heads)
        tokens.append(model.generate(ids, past_key_values=NearflashCache(array), **options).tolist())
        asked = [engine.counters.flash_bytes["token"] / n for engine, n in zip(array.engines, heads, strict=True)]
        assert max(asked) == min(asked)
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_lost_device_names_its_heads_and_the_sequences(filled):
    filled.engines[1].broken = True
    q = np.ones((2, 4, 1, 8), np.float16)
    message = (
        r"device 1 \(csd1\) with KV heads \[1, 4\) must not fail: device must answer, not be silent; "
        "lost: KV of sequences 1, 2; make an array without it"
    )
    for call in (lambda: filled.attend(0, [1, 2], q), filled.add, lambda: filled.attend(0, [1, 2], q)):
        with pytest.raises(DeviceLostError, match=message):
            call()
    filled.free(1)
    assert [list(engine.stored) for engine in filled.engines] == [[2], [2]]


def test_a_full_flash_spoils_the_sequence_alone(filled):
    rng = np.random.default_rng(3)
    filled.engines[0].room = 0
    with pytest.raises(StorageFullError) as raised:
        filled.append(2, 0, draw(rng, 4, 1, 8), draw(rng, 4, 1, 8))
    assert raised.value.__notes__ == ["on device 0 (csd0) with KV heads [0, 1)"]
    with pytest.raises(StateError, match="sequence 2 must be cropped or freed: some devices hold"):
        filled.attend(0, [2], np.ones((1, 4, 1, 8), np.float16))
    filled.free(2)
    assert filled.attend(0, [1], np.ones((1, 4, 1, 8), np.float16)).shape == (1, 4, 1, 8)


def test_a_damaged_page_is_no_lost_device(filled, monkeypatch):
    def damaged(*_, **__):
        raise PageError("page must be whole")

    with monkeypatch.context() as patched:
        patched.setattr(filled.engines[0], "attend", damaged)
        with pytest.raises(PageError, match="page must be whole"):
            filled.attend(0, [1], np.ones((1, 4, 1, 8), np.float16))
    filled.attend(0, [1], np.ones((1, 4, 1, 8), np.float16))


def test_operands_of_other_heads_are_refused(filled):
    with pytest.raises(ShapeError, match=r"operand must have 4 KV heads, not the shape \(3, 1, 8\)"):
        filled.append(1, 0, *[np.ones((3, 1, 8), np.float16)] * 2)
    with pytest.raises(ShapeError, match="operand must have 4 KV heads"):
        filled.attend(0, [1], np.ones((1, 3, 1, 8), np.float16))


def test_close_closes_every_engine(filled):
    filled.close()
    filled.close()
    assert [engine.closed for engine in filled.engines] == [2, 2]


def test_a_crop_that_one_device_rejects_leaves_nothing_that_can_be_attended_to(filled, monkeypatch):
    """The parts differ in length then: only another crop, or free, goes on."""

    def damaged(*_):
        raise PageError("page must be whole")

    length = filled.engines[0].kv(filled._numbers[1][0], 0)[0].shape[1]
    with monkeypatch.context() as patched, pytest.raises(PageError):
        patched.setattr(filled.engines[1], "crop", damaged)
        filled.crop(1, length - 1)
    with pytest.raises(StateError, match="sequence 1 must be cropped or freed"):
        filled.attend(0, [1], np.ones((1, 4, 1, 8), np.float16))
    filled.crop(1, length - 2)
    filled.attend(0, [1], np.ones((1, 4, 1, 8), np.float16))
