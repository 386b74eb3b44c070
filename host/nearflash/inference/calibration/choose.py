"""The policy of a run: the file that belongs to the model, a file given by name, or a setting that suits any model."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nearflash.abi.errors import OtherWeightsWarning, StateError
from nearflash.identity import configuration_digest, weights_digests
from nearflash.inference.policy.estimate import index_bytes, read_fraction, read_seconds
from nearflash.inference.policy.files import PolicyFile, find_policy
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.setup import default_layout
from nearflash.storage.io.profile import DriveProfile
from nearflash.storage.kv import KvLayout, KvShape

__all__ = ["AUTO", "UNIFORM", "choose_policy", "model_digest"]

AUTO = "auto"
UNIFORM = AttentionPolicy(
    AttentionMode.SPARF_PAGE, score_dims=0.5, top_k=0.25, top_p=0.95, local_window=64, min_tokens=256, keep_tail=True
)
"""For a model without a calibration: every head reads 95 % of its attention, at most a quarter of the page groups
(docs/results/accuracy.md has its loss and bytes on two models)."""
SHORT_TOKENS = 1024
"""Up to here all tokens are read: the index has no whole block yet, and all of it is in memory."""


def model_digest(config: Any) -> str:
    """Digest of a model's configuration by which policy files belong to it: all of it but how weights are stored."""
    return configuration_digest(config.get_text_config(decoder=True), without=("quantization_config",))


def choose_policy(
    config: Any, shape: KvShape, tokens: int, policy: str | Path = AUTO, *, stored: KvLayout | None = None,
    profile: DriveProfile | None = None, cache_bytes: int = 0, sequences: int = 1, model: Any = None,
) -> tuple[AttentionPolicy, KvLayout | None, str]:  # fmt: skip
    """Policy, the layout that it is for (None: any), and a sentence that says which it is and why.

    config: of the model; tokens: of the longest sequence. With "auto" the file that belongs to the model, else UNIFORM,
    or where that is much faster; contexts up to SHORT_TOKENS are read in full, and so are those that a drive of this
    profile reads as fast in full, where `cache_bytes` of memory are for what all sequences read. stored: layout of
    pages that are there already, which it must suit. model: whose weights are compared with those of the calibration:
    of others, "auto" takes no file, and one that is named is used with an OtherWeightsWarning. None: not compared.
    Raises StateError for a file that is damaged or of another configuration.
    """
    fits = _comparison(model)
    if str(policy) != AUTO:
        policy_file = PolicyFile.read(Path(policy), shape, model_digest(config))
        if stored not in (None, policy_file.layout):
            raise StateError(
                f"policy file {policy} must be for pages as they are stored, {stored}, not {policy_file.layout}"
            )
        if not fits(policy_file):
            what = "was calibrated for other weights than the model's: what it leaves out was measured on those"
            warnings.warn(f"policy file {policy} {what}; run nearflash calibrate", OtherWeightsWarning, stacklevel=2)
        return policy_file.policy, policy_file.layout, f"policy: {policy}, calibrated for {policy_file.model}"
    if tokens <= SHORT_TOKENS:
        return AttentionPolicy(), None, f"policy: dense, as no sequence exceeds {SHORT_TOKENS} tokens"
    digest = model_digest(config)
    known, why = find_policy(digest, shape, fits), "as there is no calibration of this model (nearflash calibrate)"
    if known is None and (other := find_policy(digest, shape)) is not None:
        why = f"as {other[0]} was calibrated for other weights (nearflash calibrate)"
    if known is not None and stored not in (None, known[1].layout):
        why, known = f"as the pages that are stored are not those of {known[0]}", None
    if profile is not None:
        drive = _Drive(profile, shape, tokens, sequences, cache_bytes)
        layout = stored or default_layout(shape.dim, UNIFORM, tokens, profile)
        uniform, dense = drive.estimate(layout, read_fraction(UNIFORM, shape, layout, tokens)), drive.estimate_all()
        calibrated = None if known is None else drive.estimate(known[1].layout, known[1].flash_fraction)
        best = min((option for option in (calibrated, uniform) if option is not None), key=lambda each: each.seconds)
        if dense.seconds <= best.seconds:
            return AttentionPolicy(), stored, f"policy: dense, as what is chosen would take {best}, and {dense}"
        if known is not None and calibrated is not None and uniform.seconds < _MUCH_FASTER * calibrated.seconds:
            why, known = f"as it would take {uniform}, and {known[0]} {calibrated}", None
    if known is not None:
        path, policy_file = known
        return policy_file.policy, policy_file.layout, f"policy: {path}, calibrated for {policy_file.model}"
    return UNIFORM, stored, f"policy: uniform sparf-page, {why}"


def _comparison(model: Any) -> Callable[[PolicyFile], bool]:
    """Whether a file is of a model's weights, which are read when it is first asked; of any, without a model."""

    @cache
    def own() -> tuple[str, str]:
        ((dtype, digest),) = weights_digests(model, (model.dtype,)).items()
        return dtype, digest

    def fits(file: PolicyFile) -> bool:
        if model is None:
            return True
        dtype, digest = own()
        return file.weights.get(dtype) == digest

    return fits


_MUCH_FASTER = 0.8
"""Of a calibrated policy's seconds, those of UNIFORM from which on it is worth to leave the calibration."""
_IN_USE, _HITS = 2.0, 0.9
"""Groups that were chosen for the last tokens, of those chosen for one, and the share of them that is chosen again
(page_cache.py has the measurement)."""
_ATTEND_RATE, _SCORE_RATE = 9e9, 45e9
"""Bytes of K and V a second: attended to, and scored by their index (kernels.py on one core, measured)."""


@dataclass(frozen=True)
class _Drive:
    """The drive that K and V of a job will lie on, and the memory that keeps what was read."""

    profile: DriveProfile
    shape: KvShape
    tokens: int
    sequences: int
    cache_bytes: int

    def estimate(self, layout: KvLayout, fraction: float) -> "_Estimate":
        """Seconds to read this fraction of K and V and all of the index, page by page."""
        kv_bytes = self._kv_bytes
        free_bytes = self.cache_bytes - self.sequences * index_bytes(self.shape, layout, self.tokens)
        wanted, page_bytes = fraction * kv_bytes, layout.page_bytes
        kept = min(max(free_bytes, 0) / (_IN_USE * wanted), 1.0) * _HITS
        seconds = read_seconds((1 - kept) * wanted - min(free_bytes, 0), self.profile, page_bytes)
        seconds = max(seconds, wanted / _ATTEND_RATE + kv_bytes / _SCORE_RATE)
        return _Estimate(seconds / self.sequences, f", read in pages of {page_bytes >> 10} KiB")

    def estimate_all(self) -> "_Estimate":
        """Seconds to read all K and V."""
        seconds = read_seconds(max(self._kv_bytes - self.cache_bytes, 0), self.profile)
        return _Estimate(max(seconds, self._kv_bytes / _ATTEND_RATE) / self.sequences, " for all K and V")

    @property
    def _kv_bytes(self) -> int:
        return self.sequences * self.tokens * self.shape.token_bytes


@dataclass(frozen=True)
class _Estimate:
    seconds: float
    """Of a token."""
    how: str

    def __str__(self) -> str:
        return f"{self.seconds:.2g} s a token{self.how}"
