"""The policy of a run: the file that belongs to the model, a file given by name, or a setting that suits any model."""

from pathlib import Path
from typing import Any

from nearflash.abi.errors import StateError
from nearflash.inference.policy.files import PolicyFile, find_policy, model_digest
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.kv import KvLayout, KvShape

__all__ = ["AUTO", "UNIFORM", "choose_policy"]

AUTO = "auto"
UNIFORM = AttentionPolicy(
    AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=0.25, top_p=0.95, local_window=64, min_tokens=256, keep_tail=True
)
"""For a model without a calibration: every head reads 95 % of its attention, at most a quarter of the page groups
(docs/results/accuracy.md has its loss and bytes on two models)."""
SHORT_TOKENS = 1024
"""Up to here all tokens are read: the index has no whole block yet, and all of it is in memory."""


def choose_policy(
    config: Any, shape: KvShape, tokens: int, policy: str | Path = AUTO, *, stored: KvLayout | None = None
) -> tuple[AttentionPolicy, KvLayout | None, str]:
    """Policy, the layout that it is for (None: any), and a sentence that says which it is and why.

    config: of the model; tokens: of the longest sequence. With "auto" the file that belongs to the model, else UNIFORM;
    contexts up to SHORT_TOKENS are read in full. stored: layout of pages that are there already, which it must suit.
    Raises StateError for a file that is damaged or another model's.
    """
    if str(policy) != AUTO:
        found = PolicyFile.read(Path(policy), shape, model_digest(config))
        if stored not in (None, found.layout):
            raise StateError(f"policy file {policy} must be for pages as they are stored, {stored}, not {found.layout}")
        return found.policy, found.layout, f"policy: {policy}, calibrated for {found.model}"
    if tokens <= SHORT_TOKENS:
        return AttentionPolicy(), None, f"policy: dense, as no sequence exceeds {SHORT_TOKENS} tokens"
    known = find_policy(model_digest(config), shape)
    if known is not None and stored in (None, known[1].layout):
        path, found = known
        return found.policy, found.layout, f"policy: {path}, calibrated for {found.model}"
    why = "no calibration of this model" if known is None else "one for other pages than those stored"
    return UNIFORM, None, f"policy: uniform sparf-page, as there is {why} (nearflash calibrate)"
