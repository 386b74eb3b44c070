"""Limits that a drive sets: how much a policy reads at most, and seconds that reading takes at measured rates.

Reading everything is large reads one after the other; what a policy chooses is KV page groups at random places, which
many drives read at a fraction of that rate. The processor's time is left out: it is less for what is chosen, too.
"""

from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.io.profile import DriveProfile
from nearflash.storage.kv import KvLayout, KvShape

__all__ = ["READ_DEPTH", "index_bytes", "read_fraction", "read_seconds"]

READ_DEPTH = 128
"""Reads in flight, where a layer's groups are read together."""


def index_bytes(shape: KvShape, layout: KvLayout, tokens: int) -> int:
    """Bytes of the index pages of so many tokens, all layers and heads."""
    blocks = tokens // layout.block_tokens
    return blocks * layout.index_layout(shape.dim).pages * layout.page_bytes * shape.layers * shape.kv_heads


def read_fraction(policy: AttentionPolicy, shape: KvShape, layout: KvLayout, tokens: int) -> float:
    """The share of the bytes of K and V of so many tokens that one more token asks for at most; without the index."""
    heads = [policy.at(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]
    chosen = sum(_head_fraction(policy_of_head, shape.dim, layout, tokens) for policy_of_head in heads) / len(heads)
    if policy.mode is AttentionMode.KVSWAP:  # the first layer has none before it that predicts
        chosen += (1 - chosen) / shape.layers
    return chosen


def read_seconds(size_bytes: float, profile: DriveProfile, page_bytes: int | None = None) -> float:
    """Seconds to read so much: in pages at random places, or (None) one after the other."""
    rate = profile.fastest("read") if page_bytes is None else profile.rate("random", page_bytes, READ_DEPTH)
    return size_bytes / rate / 1e9


def _head_fraction(policy: AttentionPolicy, dim: int, layout: KvLayout, tokens: int) -> float:
    """Single tokens lie in groups as if by chance."""
    if policy.mode is AttentionMode.DENSE:
        return 1.0
    share = min(policy.resolve(tokens, dim, layout).top_k * policy.entry_tokens(layout) / tokens, 1.0)
    return share if policy.chooses_groups else 1 - float((1 - share) ** layout.group_tokens)
