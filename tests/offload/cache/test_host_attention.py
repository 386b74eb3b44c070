"""Attention of the host for queries of another memory: what transformers computes, over what lies in its memory."""

from types import SimpleNamespace

import pytest
import torch

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.inference.cache.attention import near_storage_attention
from nearflash.offload.cache.host_attention import HostAttention, count_visible
from nearflash.offload.tiers.ledger import Budgets, Ledger
from nearflash.offload.tiers.link import DeviceLink

BATCH, HEADS, KV_HEADS, TOKENS, DIM = 3, 6, 2, 50, 24
MODULE = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True, training=False)


@pytest.fixture
def opened():
    ledger = Ledger()
    host = HostAttention(DeviceLink(count=ledger.count_bytes, one_memory=False), ledger, 1 << 16, lambda run: run())
    yield host, ledger
    host.close()
    assert not ledger.held["host"]


def padding(*lengths):
    """A mask of sequences that are padded on the left."""
    return (torch.arange(TOKENS) >= torch.tensor(lengths)[:, None])[:, None, None]


HOLES = padding(0, 5, 9) & (torch.arange(TOKENS) != 20)


def made(dtype, by_token):
    """Random query, new key, new value, and all keys and values, the last token's not there yet."""
    generator = torch.Generator().manual_seed(4)
    shape = (TOKENS, 2, BATCH, KV_HEADS, DIM) if by_token else (2, BATCH, KV_HEADS, TOKENS, DIM)
    states = torch.randn(shape, generator=generator).to(dtype)
    states = states.permute(1, 2, 3, 0, 4) if by_token else states
    new = [torch.randn(BATCH, heads, 1, DIM, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return *new, states


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("mask", "softcap", "sinks"),
    [(None, None, False), (padding(0, 7, 49), None, True), (padding(0, 7, 49), 5.0, False), (HOLES, None, False)],
    ids=["all", "sinks", "softcap", "holes"],
)
def test_it_is_transformers_own(opened, dtype, by_token, mask, softcap, sinks):
    host, ledger = opened
    query, key, value, states = made(dtype, by_token)
    aux = torch.linspace(-1, 1, HEADS) if sinks else None
    every = states.float()
    every[0, :, :, -1:], every[1, :, :, -1:] = key, value
    want, _ = near_storage_attention(
        MODULE, query.float(), every[0], every[1], mask, scaling=0.3, softcap=softcap, s_aux=aux
    )
    asked = host.ask(key, states, 0)
    found, _ = near_storage_attention(MODULE, query, asked, value, mask, scaling=0.3, softcap=softcap, s_aux=aux)
    assert found.dtype == dtype and found.shape == (BATCH, 1, HEADS, DIM)
    torch.testing.assert_close(found.float(), want, rtol=0, atol={2: 2e-2 if dtype is torch.bfloat16 else 2e-3}.get(
        dtype.itemsize, 1e-5))  # fmt: skip
    assert torch.equal(states[0, :, :, -1:], key) and torch.equal(states[1, :, :, -1:], value)
    assert ledger.links["cache gpu to host"] == (HEADS + 2 * KV_HEADS) * BATCH * DIM * dtype.itemsize
    assert ledger.links["cache host to gpu"] == HEADS * BATCH * DIM * dtype.itemsize


def test_a_mask_comes_once_for_all_layers(opened):
    host, ledger = opened
    mask = padding(1, 2, 3)
    for number in range(3):
        query, key, value, states = made(torch.float16, False)
        near_storage_attention(MODULE, query, host.ask(key, states, number), value, mask)
    assert ledger.links["masks gpu to host"] == mask.nbytes


def test_tokens_that_are_seen_are_counted():
    assert count_visible(None, 2, 5) == [5, 5]
    assert count_visible(padding(0, 7, 49), 3, TOKENS) == [50, 43, 1]
    assert count_visible(padding(7), 3, TOKENS) == [43] * 3
    assert count_visible(HOLES, 3, TOKENS) is None
    assert count_visible(padding(0, 1, 2).float(), 3, TOKENS) is None
    assert count_visible(padding(0, 1, 2).expand(3, HEADS, 1, TOKENS), 3, TOKENS) is None


def test_several_tokens_behind_a_prompt_are_an_error(opened):
    key = torch.zeros(BATCH, KV_HEADS, 2, DIM)
    with pytest.raises(UnsupportedError, match="layer 3 must be given 1 token at a time behind the prompt, not 2"):
        opened[0].ask(key, made(torch.float32, False)[3], 3)


def test_its_memory_counts():
    with pytest.raises(CommandError, match=r"budget of host must be 200 bytes .* queries and outputs of attention"):
        HostAttention(DeviceLink(one_memory=False), Ledger(Budgets(host=199)), 100, lambda run: run())
