"""doclm-7m generates on every attend device what it generates on the model's."""

from pathlib import Path

import pytest

from nearflash.device import open_device
from nearflash.inference.engines.device.engine import DeviceEngine
from nearflash.inference.generate import generate
from nearflash.inference.models import kv_shape, load_model
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.setup import flash_geometry
from nearflash.storage.flash.memory import MemoryFlash
from nearflash.storage.flash.nand import NandFlash
from nearflash.storage.kv import KvLayout, KvStore

KERNEL = "attend"
PROMPTS = ["The committee met in the spring of that year and decided that the old bridge", "Water"]
LAYOUT = KvLayout(group_tokens=8, interleaved=True, block_tokens=16, index_format=2, page_bytes=4096)
NAND_BLOCK_PAGES = 768
"""Of the NAND behind attend-tiny."""
POLICIES = {
    "dense": AttentionPolicy(),
    "sparf-page": AttentionPolicy("sparf-page", score_dims=0.25, top_k=0.5, local_window=4),
}


@pytest.fixture(scope="module")
def loaded():
    return load_model(Path(__file__).parents[1] / "data" / "doclm-7m")


def tokens_on(device, loaded, policy, *, nand=False):
    """Three new tokens of each prompt; the device stays open."""
    model, tokenizer = loaded
    shape = kv_shape(model)
    if nand:
        flash = NandFlash(device, pages_per_block=NAND_BLOCK_PAGES, blocks_per_lun=3, paired=False)
    else:
        flash = MemoryFlash(device, flash_geometry(shape, LAYOUT, 40, 2, device.identity.config.channels))
    engine = DeviceEngine(device, KvStore(flash, shape, LAYOUT), policy)
    try:
        return generate(model, tokenizer, PROMPTS, engine, max_new_tokens=3).tokens
    finally:
        engine.store.close()


@pytest.mark.parametrize("mode", [pytest.param("dense", marks=pytest.mark.full), "sparf-page"])
def test_tokens_are_those_of_the_model_device(device, loaded, mode):
    with open_device(f"model:{device.identity.config.full_name}") as model:
        expected = tokens_on(model, loaded, POLICIES[mode])
    assert tokens_on(device, loaded, POLICIES[mode]) == expected


@pytest.mark.full
def test_pages_that_the_device_writes_to_its_nand_give_the_same(device, loaded):
    policy = POLICIES["sparf-page"]
    with open_device(f"model:{device.identity.config.full_name}") as model:
        expected = tokens_on(model, loaded, policy)
    assert tokens_on(device, loaded, policy, nand=True) == expected
