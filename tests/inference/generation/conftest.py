"""A small model, and an engine in plain arrays."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nearflash.abi.errors import DeviceError, StorageFullError
from nearflash.inference.cache.attention import attach
from nearflash.inference.engines.base import Engine, EngineCounters
from nearflash.inference.models import load_model

DATA = Path(__file__).parents[2] / "data"


class ArrayEngine(Engine):
    """Dense attention in float32 over lists of arrays."""

    def __init__(self, kv_heads, name="array"):
        self.name, self.kv_heads = name, kv_heads
        self.stored: dict[int, dict[int, list]] = {}
        self.room = 1 << 30
        self.broken = False
        self.closed = 0
        self._counters = EngineCounters()
        self._next = 0

    def add(self):
        self._next += 1
        self.stored[self._next] = {}
        return self._next

    def free(self, sequence):
        del self.stored[sequence]

    def append(self, sequence, layer, k, v):
        assert k.dtype == v.dtype == np.float16 and k.shape == v.shape and k.shape[0] == self.kv_heads
        self._fail()
        if k.size > self.room:
            raise StorageFullError("flash must have room")
        self.room -= k.size
        self.stored[sequence].setdefault(layer, []).append((k.copy(), v.copy()))

    def kv(self, sequence, layer):
        return [np.concatenate(arrays, 1) for arrays in zip(*self.stored[sequence][layer], strict=True)]

    def fork(self, sequence):
        self._next += 1
        self.stored[self._next] = {layer: list(arrays) for layer, arrays in self.stored[sequence].items()}
        return self._next

    def crop(self, sequence, length):
        for layer in self.stored[sequence]:
            k, v = self.kv(sequence, layer)
            assert 0 <= length <= k.shape[1]
            self.stored[sequence][layer] = [(k[:, :length], v[:, :length])]

    def attend(self, layer, sequences, q, scaling=None, *, softcap=None, sinks=None):
        self._fail()
        several = q[:, :, None] if q.ndim == 4 else q
        out = np.zeros(several.shape, np.float32)
        for row, sequence in enumerate(sequences):
            k, v = (x.astype(np.float32) for x in self.kv(sequence, layer))
            new, tokens = several.shape[2], k.shape[1]
            factor = q.shape[-1] ** -0.5 if scaling is None else scaling
            score = np.einsum("htgd,hsd->htgs", several[row].astype(np.float32), k) * factor
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            score[
                np.broadcast_to(np.arange(tokens) > np.arange(tokens - new, tokens)[:, None, None], score.shape)
            ] = -1e30
            if sinks is not None:
                score = np.concatenate([score, np.broadcast_to(sinks[:, None, :, None], (*score.shape[:3], 1))], -1)
            p = np.exp(score - score.max(-1, keepdims=True))
            out[row] = np.einsum("htgs,hsd->htgd", (p / p.sum(-1, keepdims=True))[..., :tokens], v)
            self._counters.heads += self.kv_heads
            self._counters.count("token", k.size * 4)
        return out.reshape(q.shape)

    takes_masks = True

    def attend_masked(self, layer, sequence, q, visible, scaling=None):
        k, v = (x.astype(np.float32) for x in self.kv(sequence, layer))
        factor = q.shape[-1] ** -0.5 if scaling is None else scaling
        score = np.einsum("htgd,hsd->htgs", q.astype(np.float32), k) * factor
        p = np.where(visible[:, None], np.exp(score - score.max(-1, keepdims=True)), 0)
        return np.einsum("htgs,hsd->htgd", p / np.maximum(p.sum(-1, keepdims=True), 1e-30), v)

    def _fail(self):
        if self.broken:
            raise DeviceError("device must answer, not be silent")

    @property
    def counters(self):
        return self._counters

    def close(self):
        self.closed += 1


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def doclm_folder():
    return DATA / "doclm-7m"


@pytest.fixture(scope="session")
def loaded(doclm_folder):
    return load_model(doclm_folder)


@pytest.fixture(scope="session")
def doclm(loaded):
    """doclm-7m in fp32, attached to near storage."""
    return loaded[0]


@pytest.fixture(scope="session")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture
def make_engine():
    return ArrayEngine


@pytest.fixture
def engine(make_engine):
    """For doclm-7m."""
    return make_engine(2)


@pytest.fixture(scope="session")
def make_model():
    """A random Llama, attached: layers, heads, KV heads, head dimension."""

    def make(layers=2, heads=4, kv_heads=2, dim=16, dtype=torch.float32, seed=1, **more):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=97, hidden_size=heads * dim, intermediate_size=64, num_hidden_layers=layers, head_dim=dim,
            num_attention_heads=heads, num_key_value_heads=kv_heads, pad_token_id=0, bos_token_id=1, eos_token_id=None,
            initializer_range=0.2, **more,
        )  # fmt: skip
        return attach(LlamaForCausalLM(config).to(dtype).eval())

    return make
