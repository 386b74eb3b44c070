"""How to attend, for any number of tokens: an AttentionPolicy, and the descriptors that it makes for devices.

A policy does not depend on pages; where tokens and index rows lie is a KvLayout.
Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.fixed_point import LOG2E
from nearflash.abi.errors import CommandError
from nearflash.storage.kv import KvLayout

__all__ = ["AttentionMode", "AttentionPolicy", "ResolvedPolicy"]

_MASS_ONE = 1 << 16


class AttentionMode(StrEnum):
    """Which tokens are attended to."""

    DENSE = "dense"
    SPARQ = "sparq"
    """Single tokens by approximate scores; no pages (the reference: SparQ)."""
    SPARF = "sparf"
    """The same tokens, read from pages and filtered (InstInfer)."""
    SPARF_PAGE = "sparf-page"
    """Whole KV page groups by approximate scores."""
    KVSWAP = "kvswap"
    """Whole KV page groups, the same for all heads, by queries that the layer before predicts (KVSwap)."""


@dataclass(frozen=True)
class ResolvedPolicy:
    """A policy in numbers, for one head of S tokens."""

    score_dims: int
    """r; 0 for dense."""
    top_k: int
    """k, entries: tokens, or KV page groups in `sparf-page`; never below what the local window needs. 0 for dense."""
    local_window: int
    """l, tokens; at least the current one."""
    top_p: int
    """tau in 2^-16; 0: `top_k` decides alone."""


@dataclass(frozen=True)
class AttentionPolicy:
    """How to attend. Of `score_dims` and `top_k` an int is a count, a float a fraction (of d, of the entries).

    Raises CommandError for values that make no sense.
    """

    mode: AttentionMode = AttentionMode.DENSE
    score_dims: int | float = 0.25
    """r, of the approximate score; in `kvswap` the values of its index for each token and KV head."""
    top_k: int | float = 0.125
    """k, of tokens (of KV page groups in `sparf-page` and `kvswap`); with `top_p`, the most that are taken."""
    top_p: float = 0.0
    """tau: take entries until their approximate probabilities reach this share; 0: take `top_k` of them."""
    local_window: int = 64
    """l: the last tokens, always taken; the current one is among them."""
    by_probability: bool = True
    """Rank by probability summed over the query heads of a group (else by logits)."""
    overrides: Mapping[int | tuple[int, int], "AttentionPolicy"] = field(default_factory=dict, hash=False)
    """Another policy for a layer, or for a (layer, KV head), which goes first."""
    min_tokens: int = 0
    """`top_k` is never less than this many tokens: what is short is attended to in full."""
    keep_tail: bool = False
    """Take all tokens after the last whole index block, too, beside `top_k`: KvStore has them in memory.

    `kvswap` always does.
    """

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "mode", AttentionMode(self.mode))
        except ValueError:
            names = ", ".join(AttentionMode)
            raise CommandError(f"mode must be one of {names}, not {self.mode!r}") from None
        by_mass = self.by_probability and self.mode not in (AttentionMode.DENSE, AttentionMode.KVSWAP)
        alike = not any(AttentionMode.KVSWAP in (self.mode, other.mode) for other in self.overrides.values())
        rules = {
            "score_dims": (_is_amount(self.score_dims), "a count from 1 or a fraction above 0, up to 1.0"),
            "top_k": (_is_amount(self.top_k), "a count from 1 or a fraction above 0, up to 1.0"),
            "top_p": (self.top_p == 0 or (0 < self.top_p < 1 and by_mass), "0, or below 1 and with by_probability"),
            "local_window": (_is_count(self.local_window), "a count from 1"),
            "min_tokens": (self.min_tokens == 0 or _is_count(self.min_tokens), "a count, or 0"),
            "overrides": (
                alike and not any(o.overrides for o in self.overrides.values()),
                "policies without overrides, and none with kvswap, which chooses for all heads alike",
            ),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise CommandError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    def at(self, layer: int, head: int) -> "AttentionPolicy":
        """The policy of one KV head, overrides applied."""
        return self.overrides.get((layer, head)) or self.overrides.get(layer) or self

    def entry_tokens(self, layout: KvLayout) -> int:
        """Tokens that one entry of the selection can hold: n where whole groups are chosen, else 1."""
        return layout.group_tokens if self.chooses_groups else 1

    @property
    def takes_suffix(self) -> bool:
        """Whether all tokens after the last whole index block are taken beside those that are chosen."""
        return self.keep_tail or self.mode is AttentionMode.KVSWAP

    @property
    def chooses_groups(self) -> bool:
        """Whether whole KV page groups are chosen."""
        return self.mode in (AttentionMode.SPARF_PAGE, AttentionMode.KVSWAP)

    def resolve(self, tokens: int, dim: int, layout: KvLayout) -> ResolvedPolicy:
        """Resolve this policy for S = `tokens`, without overrides. Raises CommandError for score_dims > dim."""
        if tokens < 1:
            raise CommandError(f"tokens must be at least 1, not {tokens!r}")
        if self.mode is AttentionMode.DENSE:
            return ResolvedPolicy(0, 0, self.local_window, 0)
        score_dims = _count(self.score_dims, dim)
        if score_dims > dim:
            raise CommandError(f"score_dims must be at most {dim}, the head dimension, not {score_dims!r}")
        entry = self.entry_tokens(layout)
        suffix = tokens % layout.block_tokens if self.takes_suffix else 0
        entries, beside = -(-tokens // entry), -(-suffix // entry)
        local_window = max(min(self.local_window, tokens), suffix)
        window = entries - (tokens - local_window) // entry
        top_k = beside + max(-(-self.min_tokens // entry), _count(self.top_k, max(entries - beside, 1)))
        top_k = min(entries, max(window, top_k))
        return ResolvedPolicy(score_dims, top_k, local_window, min(round(self.top_p * _MASS_ONE), _MASS_ONE - 1))

    def descriptor(
        self, page_tag: PageTag, dim: int, tokens: int, group: int, layout: KvLayout, *,
        scaling: float | None = None, reference: tuple[int, ...] = (),
    ) -> AttendDescriptor:  # fmt: skip
        """The descriptor of `page_tag`'s head, overrides applied; its addresses are 0, for the caller to replace.

        `scaling` is softmax's, by default 1/sqrt(dim). Dense attention without `reference` begins with zeros: the
        driver repeats a head whose reference was off.
        """
        head_policy = self.at(page_tag.layer, page_tag.head)
        resolved = head_policy.resolve(tokens, dim, layout)
        mode = head_policy._flags
        if mode & Mode.DENSE:
            reference = reference or (0,) * group
        return AttendDescriptor(
            mode | Mode.REFERENCE if reference else mode, page_tag, dim, tokens, group,
            resolved.score_dims, resolved.top_k, resolved.local_window, layout.group_tokens, layout.interleaved,
            layout.block_tokens, layout.index_format, layout.page_bytes,
            LOG2E * (dim**-0.5 if scaling is None else scaling),
            0, 0, 0, 0, 0, resolved.top_p, reference,
        )  # fmt: skip

    @property
    def _flags(self) -> Mode:
        if self.mode is AttentionMode.DENSE:
            return Mode.DENSE
        page = Mode.PAGE if self.mode is AttentionMode.SPARF_PAGE else Mode(0)
        return page | (Mode.PROBABILITY if self.by_probability else Mode(0))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_amount(value: object) -> bool:
    return _is_count(value) or (isinstance(value, float) and 0 < value <= 1)


def _count(amount: int | float, of: int) -> int:
    return amount if isinstance(amount, int) else max(1, round(amount * of))
