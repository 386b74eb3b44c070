"""The shape of a decoder: what each layer holds, and the bytes of its weights and of its KV cache.

`from_config` reads a transformers configuration by the keys it has. Its matrices are exact for the families that the
tests list, its vectors (norms and biases, under 0.1 % of a model) count norms alone, as no key names the others.
`from_parameters` reads names and shapes of parameters, of a model on the meta device or of a checkpoint's headers, and
is exact.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from nearflash.abi.errors import PlanError

__all__ = ["GROUP", "LayerShape", "Linear", "ModelShape", "bytes_of", "from_config", "text_config"]

GROUP = 64
"""Codes of 4 bits that share a scale and a minimum of 16 bits each."""
_MOST, _MOST_LAYERS = 1 << 40, 10_000
"""Of any number of a configuration; each layer is listed."""
_DTYPE_BYTES = {"float32": 4, "float64": 8}


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
    vectors: norms and biases outside experts, never quantised. expert_vectors: those of one expert.
    """

    linears: tuple[Linear, ...]
    vectors: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_vectors: int = 0

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
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in one layer, not quantised."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes

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


def _layer_bytes(layer: LayerShape, bits: int, element_bytes: int) -> float:
    vectors = layer.vectors + layer.expert_vectors * layer.experts
    return bytes_of(layer.parameters - vectors, bits, element_bytes) + vectors * element_bytes


def _is_of_experts(name: str) -> bool:
    return "experts." in name


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the decoder: `text_config` where there is one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers configuration (config.json as a dict) describes. Raises PlanError.

    Keys decide, not names of models: experts by their count, a gated FFN by its activation or an RMS norm, learned
    positions where no key of rotary ones is there.
    """
    if config.get("is_encoder_decoder"):
        raise PlanError("the model must be a decoder alone, but its config states is_encoder_decoder")
    text = text_config(config)
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    number = _count(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if number > _MOST_LAYERS:
        raise PlanError(f"the layers of the model's config must be {_MOST_LAYERS} at most, not {number}")
    heads = _count(text, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _optional(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        kv_heads = 1
    head_dim = _optional(text, "head_dim") or hidden // heads
    if not head_dim or kv_heads > heads:
        raise PlanError(
            f"the model's config must have heads of 1 dim at least, and no more KV heads than heads, not {heads} heads "
            f"and {kv_heads} KV heads of {hidden} dims"
        )
    vocabulary = _count(text, "vocab_size")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
    attention = (
        Linear("attention.q", heads * head_dim, hidden),
        Linear("attention.k", kv_heads * head_dim, hidden),
        Linear("attention.v", kv_heads * head_dim, hidden),
        Linear("attention.o", hidden, heads * head_dim),
    )
    norms = (2 if "rms_norm_eps" in text else 4) * hidden
    layers = tuple(_layer(text, at, hidden, attention, norms) for at in range(number))
    # A narrower embedding is projected up and down.
    width = _optional(text, "word_embed_proj_dim") or hidden
    positions = _count_positions(text) * hidden
    projections = 2 * width * hidden if width != hidden else 0
    return ModelShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        max_tokens=_optional(text, "max_position_embeddings", "n_positions", "max_seq_len") or 1 << 20,
        layers=layers,
        embedding=vocabulary * width + positions + projections,
        head=vocabulary * width,
        tied=tied,
        vectors=norms // 2,
        element_bytes=_element_bytes(config),
    )


def _element_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of the dtype that the configuration names; 2 where it names none."""
    text = text_config(config)
    names = (source.get(key) for source in (config, text) for key in ("dtype", "torch_dtype"))
    name = next((name for name in names if name), "")
    return _DTYPE_BYTES.get(str(name).removeprefix("torch."), 2)


def _layer(
    text: Mapping[str, Any], at: int, hidden: int, attention: tuple[Linear, ...], norms: int
) -> LayerShape:  # fmt: skip
    experts = _optional(text, "num_local_experts", "num_experts", "n_routed_experts") or 0
    step = _optional(text, "decoder_sparse_step") or 1
    only = text.get("mlp_only_layers") or ()
    if not isinstance(only, list | tuple):
        raise PlanError(f"mlp_only_layers in the model's config must be a list, not {only!r:.80}")
    dense = at in only or (at + 1) % step != 0
    dense = dense or at < (_optional(text, "first_k_dense_replace") or 0)
    inner = _optional(text, "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size") or 4 * hidden
    if not experts or dense:
        return LayerShape((*attention, *_ffn(text, "mlp", hidden, inner)), norms)
    width = _optional(text, "moe_intermediate_size") or inner
    shared = _optional(text, "shared_expert_intermediate_size") or 0
    shared = shared or width * (_optional(text, "n_shared_experts") or 0)
    gate = (Linear("mlp.shared_gate", 1, hidden),) if "shared_expert_intermediate_size" in text else ()
    linears = (
        *attention,
        Linear("mlp.router", experts, hidden),
        *(_ffn(text, "mlp.shared", hidden, shared) if shared else ()),
        *gate,
        *_ffn(text, "mlp.experts", hidden, width, experts),
    )
    chosen = _count(text, "num_experts_per_tok", "experts_per_token", "moe_top_k")
    if chosen > experts:
        raise PlanError(f"a token's experts in the model's config must be {experts} at most, not {chosen}")
    return LayerShape(linears, norms, experts, chosen)


def _ffn(text: Mapping[str, Any], name: str, hidden: int, inner: int, count: int = 1) -> tuple[Linear, ...]:
    up = (Linear(f"{name}.up", inner, hidden, count), Linear(f"{name}.down", hidden, inner, count))
    return (Linear(f"{name}.gate", inner, hidden, count), *up) if _is_gated(text) else up


def _is_gated(text: Mapping[str, Any]) -> bool:
    keys = ("hidden_act", "hidden_activation", "activation_function")
    activation = next((text[key] for key in keys if text.get(key)), "")
    return "rms_norm_eps" in text or activation in ("silu", "swish")


def _count_positions(text: Mapping[str, Any]) -> int:
    """Positions of a learned table, 0 for rotary ones; two more where an offset goes with a projected embedding."""
    rotary = ("rope", "rotary", "alibi", "rms_norm")
    if any(key.startswith(rotary) or "rotary" in key for key in text):
        return 0
    offset = 2 if "word_embed_proj_dim" in text else 0
    return (_optional(text, "max_position_embeddings", "n_positions") or 0) + offset


def _optional(text: Mapping[str, Any], *keys: str) -> int | None:
    """The first key that is there and not null. Raises PlanError where it is no whole number of 0 or more."""
    for key in keys:
        value = text.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
                rule = (
                    f"a whole number, {_MOST} at most"
                    if type(value) is int and value > 0
                    else "a whole number, 0 or more"
                )
                raise PlanError(f"{key} in the model's config must be {rule}, not {value!r:.80}")
            return value
    return None


def _count(text: Mapping[str, Any], *keys: str) -> int:
    value = _optional(text, *keys)
    if not value:
        raise PlanError(f"the model's config must have one of {', '.join(keys)}, 1 at least, not {value!r}")
    return value
