"""The shape of a decoder: what each layer holds, and the bytes of its weights and of its KV cache.

`from_config` reads the keys of published models that come along, for what compares with papers: its matrices are exact,
its vectors (norms and biases, under 0.1 % of a model) count norms alone. A user's model is measured in transformers
(nearflash.offload.machine.shape), whose parameters `from_parameters` reads: exact.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nearflash.abi.errors import PlanError

__all__ = ["GROUP", "LayerShape", "Linear", "ModelShape", "bytes_of", "from_config"]

GROUP = 64
"""Codes of 4 bits that share a scale and a minimum of 16 bits each."""


def bytes_of(elements: float, bits: int, element_bytes: int) -> float:
    """Bytes of so many values: as the model has them (`bits` 16), or codes with a scale and a minimum a group (4.5 bits
    for 4).
    """
    return elements * (element_bytes if bits == 16 else (bits + 32 / GROUP) / 8)


@dataclass(frozen=True)
class Linear:
    """A matrix of a layer: `rows` outputs from `columns` inputs; `count` of them where experts repeat it."""

    name: str
    rows: int
    columns: int
    count: int = 1

    @property
    def parameters(self) -> int:
        """Its weights, those of all experts together."""
        return self.rows * self.columns * self.count


@dataclass(frozen=True)
class LayerShape:
    """Contents of one decoder layer; numbers are parameters.

    linears: every matrix, in the order of the computation; experts and their router included.
    vectors: norms and biases outside experts, never quantised. expert_vectors: those of one expert. kv: elements of K
    and V of one token, 0 where nothing is cached that grows. window: tokens that a new one sees, None for all.
    """

    linears: tuple[Linear, ...]
    vectors: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_vectors: int = 0
    kv: int = 0
    window: int | None = None

    @cached_property
    def expert(self) -> int:
        """Parameters of one expert, 0 in a layer without."""
        matrices = sum(linear.rows * linear.columns for linear in self.linears if _is_of_experts(linear.name))
        return matrices + self.expert_vectors

    @cached_property
    def shared(self) -> int:
        """Parameters that every token reads: all but the experts'."""
        return sum(linear.parameters for linear in self.linears if not _is_of_experts(linear.name)) + self.vectors

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.shared + self.expert * self.experts

    def distinct_experts(self, tokens: float) -> float:
        """Expected experts that a batch of tokens reads, each routed by itself: E·(1 - (1 - k/E)^tokens)."""
        if not self.experts:
            return 0.0
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1 - missed)

    def read_parameters(self, tokens: float) -> float:
        """Expected parameters that a batch of so many tokens reads."""
        return self.shared + self.expert * self.distinct_experts(tokens)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with."""
        return self.shared + self.expert * self.experts_per_token


@dataclass(frozen=True)
class ModelShape:
    """A decoder: its layers and what lies outside them; numbers are parameters, heads, dims or tokens.

    embedding: matrices that tokens are looked up in, positions included. head: the matrix that gives logits, which
    `tied` shares with the embedding. vectors: norms and biases outside the layers. element_bytes: of a weight, a key or
    an activation that is not quantised, by the dtype that the model computes in.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_tokens: int
    layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    tied: bool
    vectors: int = 0
    element_bytes: int = 2

    @cached_property
    def kinds(self) -> tuple[tuple[LayerShape, int], ...]:
        """The layers that differ, and how many there are of each."""
        return tuple(Counter(self.layers).items())

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding once."""
        return sum(number * layer.parameters for layer, number in self.kinds) + self.outside

    @property
    def outside(self) -> int:
        """Parameters outside the layers."""
        return self.embedding + (0 if self.tied else self.head) + self.vectors

    @property
    def state_waits(self) -> int:
        """Layers before which hidden states wait, where these lie elsewhere meanwhile."""
        return len(self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers, not quantised."""
        return self.element_bytes * sum(number * layer.kv for layer, number in self.kinds)

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes of K and V of one token in the layer that has most, not quantised."""
        return self.element_bytes * max(layer.kv for layer, _ in self.kinds)

    def visible_kv_bytes(self, tokens: float) -> float:
        """Bytes of K and V in all layers that a token after so many others attends to, not quantised."""
        return self.element_bytes * sum(
            number * layer.kv * _visible_tokens(layer, tokens) for layer, number in self.kinds
        )

    def visible_tokens(self, tokens: float) -> float:
        """Tokens that a token after so many others attends to, in all layers together."""
        return sum(number * _visible_tokens(layer, tokens) for layer, number in self.kinds if layer.kv)

    @cached_property
    def widest(self) -> int:
        """The widest input or output of a layer's matrices, in elements a token (k experts at once)."""
        return max(max(linear.rows, linear.columns) * (layer.experts_per_token if _is_of_experts(linear.name) else 1)
                   for layer, _ in self.kinds for linear in layer.linears)  # fmt: skip

    @cached_property
    def largest_layer(self) -> LayerShape:
        """The layer with most parameters."""
        return max((layer for layer, _ in self.kinds), key=lambda layer: layer.parameters)

    def layer_bytes(self, bits: int = 16) -> tuple[float, ...]:
        """Bytes of the weights of each layer; vectors are never quantised."""
        sizes = {layer: _layer_bytes(layer, bits, self.element_bytes) for layer, _ in self.kinds}
        return tuple(sizes[layer] for layer in self.layers)

    def weight_bytes(self, bits: int = 16, stored_fraction: float = 1.0) -> tuple[float, float]:
        """Bytes of all layers and of the largest, matrices stored in a fraction of theirs."""
        total = largest = 0.0
        for layer, number in self.kinds:
            vectors = self.element_bytes * (layer.vectors + layer.expert_vectors * layer.experts)
            size = (_layer_bytes(layer, bits, self.element_bytes) - vectors) * stored_fraction + vectors
            total, largest = total + number * size, max(largest, size)
        return total, largest

    def digest(self) -> str:
        """SHA-256 of the shape, hexadecimal: plans of another shape are rejected by it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def _visible_tokens(layer: LayerShape, tokens: float) -> float:
    return tokens if layer.window is None else min(tokens, layer.window)


def _layer_bytes(layer: LayerShape, bits: int, element_bytes: int) -> float:
    vectors = layer.vectors + layer.expert_vectors * layer.experts
    return bytes_of(layer.parameters - vectors, bits, element_bytes) + vectors * element_bytes


def _is_of_experts(name: str) -> bool:
    return "experts." in name


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a published model: of OPT's form (`ffn_dim`: learned positions, biases), or of Llama's and Mixtral's
    (`intermediate_size`: gated, RMS norms, experts), by the keys of its config.json. Raises PlanError for one it lacks.
    """
    try:
        return _read_config(config)
    except KeyError as error:
        raise PlanError(f"a model's table must have {error.args[0]}") from None


def _read_config(config: Mapping[str, Any]) -> ModelShape:
    hidden, heads, vocabulary = (config[key] for key in ("hidden_size", "num_attention_heads", "vocab_size"))
    kv_heads, head_dim = config.get("num_key_value_heads", heads), config.get("head_dim") or hidden // heads
    is_opt, experts = "ffn_dim" in config, config.get("num_local_experts", 0)
    inner, name = config["ffn_dim" if is_opt else "intermediate_size"], "mlp.experts" if experts else "mlp"
    linears = (
        Linear("attention.q", heads * head_dim, hidden),
        Linear("attention.k", kv_heads * head_dim, hidden),
        Linear("attention.v", kv_heads * head_dim, hidden),
        Linear("attention.o", hidden, heads * head_dim),
        *((Linear("mlp.router", experts, hidden),) if experts else ()),
        *(() if is_opt else (Linear(f"{name}.gate", inner, hidden, experts or 1),)),
        Linear(f"{name}.up", inner, hidden, experts or 1),
        Linear(f"{name}.down", hidden, inner, experts or 1),
    )
    norms = (4 if is_opt else 2) * hidden
    chosen = config["num_experts_per_tok"] if experts else 0
    layer = LayerShape(linears, norms, experts, chosen, kv=2 * kv_heads * head_dim)
    tokens = config.get("max_position_embeddings", 1 << 20)
    return ModelShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_tokens=tokens,
        layers=(layer,) * config["num_hidden_layers"],
        embedding=(vocabulary + (tokens + 2 if is_opt else 0)) * hidden,  # OPT's table begins two positions early
        head=vocabulary * hidden,
        tied=config.get("tie_word_embeddings", True),
        vectors=norms // 2,
    )
