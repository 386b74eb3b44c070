"""The settings that the accuracy bench compares: for every mode and model a recommended one, and a sweep around it.

`sparf` is the published one (InstInfer: single tokens, a fp16 index of two dims a page); `sparf-page` is
calibrated by head where there is a calibration. Budgets of the baselines are what `sparf-page` reads, or more.
"""

from pathlib import Path
from typing import Any

from nearflash.abi.attention.pages import IndexFormat, TokenLayout
from nearflash.abi.errors import CommandError
from nearflash.bench.inference.settings import BASELINES, Setting, baseline, by_policy
from nearflash.inference.cache.decoder import kv_shape_of
from nearflash.inference.calibration.choose import AUTO, choose_policy
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.setup import default_layout
from nearflash.storage.kv import KvLayout

__all__ = ["MODES", "every_setting", "recommend"]

MODES = (*AttentionMode, *BASELINES)
_LOCAL = 64
_BASELINE_BUDGET = 0.2
_LONG = 1 << 20
"""Tokens: settings are those of a long context."""


def recommend(config: Any, mode: str, policy: str | Path = AUTO, counted: int = 1) -> Setting:
    """The setting of a mode that a user of this model should begin with.

    config: the model's; policy: a policy file for `sparf-page`, or "auto"; counted: see `by_policy`.
    Raises CommandError for a mode that is not in MODES, StateError for a policy file that cannot be used.
    """
    if mode not in MODES:
        raise CommandError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    if mode in BASELINES:
        return baseline(mode, _BASELINE_BUDGET)
    dim = kv_shape_of(config).dim
    if mode == AttentionMode.DENSE:
        return by_policy(AttentionPolicy(), _layout_as_published(dim), dim, counted)
    if mode == AttentionMode.SPARF_PAGE:
        return by_policy(*_page(config, policy), dim, counted)
    return _setting_as_published(AttentionMode(mode), dim, 1 / 16)


def every_setting(config: Any) -> list[Setting]:
    """All settings that a full run measures."""
    dim, (policy, layout) = kv_shape_of(config).dim, _page(config, AUTO)
    published = [_setting_as_published(AttentionMode.SPARF, dim, top_k) for top_k in (1 / 32, 1 / 16, 1 / 8)]
    by_logits = _setting_as_published(AttentionMode.SPARF, dim, 1 / 16, by_probability=False)
    alike = [_alike(dim, layout, top_p) for top_p in (0.9, 0.95)]
    baselines = [baseline(mode, top_k) for mode in BASELINES for top_k in (0.1, 0.2, 0.4)]
    return [*published, by_logits, *alike, by_policy(policy, layout, dim), *baselines]


def _page(config: Any, policy: str | Path) -> tuple[AttentionPolicy, KvLayout]:
    shape = kv_shape_of(config)
    chosen, layout, _ = choose_policy(config, shape, _LONG, policy)
    return chosen, layout or default_layout(shape.dim, chosen, _LONG)


def _setting_as_published(mode: AttentionMode, dim: int, top_k: float, *, by_probability: bool = True) -> Setting:
    """An eighth of the dims."""
    policy = AttentionPolicy(mode, dim // 8, top_k, local_window=_LOCAL, by_probability=by_probability)
    return by_policy(policy, _layout_as_published(dim), dim)


def _layout_as_published(dim: int) -> KvLayout:
    """K and V apart, pages of 4 KiB filled with tokens, a fp16 index of two dims a page."""
    return KvLayout(TokenLayout.capacity(4096, dim, False), False, 1024, IndexFormat.FP16, 4096)


def _alike(dim: int, layout: KvLayout, top_p: float) -> Setting:
    """Pages by mass with the same r and tau for every head."""
    policy = AttentionPolicy(AttentionMode.SPARF_PAGE, dim // 2, 0.25, top_p, _LOCAL, keep_tail=True)
    return by_policy(policy, layout, dim)
