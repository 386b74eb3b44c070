"""A picture of a plan: where every byte lies, and one step of decode on a time line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nearflash.abi.errors import PlanError
from nearflash.planning.memory import TIERS, peak_vectors
from nearflash.planning.search import Plan
from nearflash.planning.terms import VARIABLES, PolicyOptions, shares_vector
from nearflash.support.files import replace_file

__all__ = ["save_curve", "save_picture", "tier_bytes"]

_KINDS = ("weights", "cache", "activations", "working set")
_COLOURS = {"weights": "#4878a8", "cache": "#e08a3c", "activations": "#6aa66a", "working set": "#a0a0a0"}


def tier_bytes(plan: Plan) -> dict[str, dict[str, float]]:
    """Bytes in decode by tier and kind; what a share holds includes the buffers that grow with it."""
    shares = shares_vector(plan.policy)
    vectors = peak_vectors(plan.shape, plan.machine, plan.workload, PolicyOptions.of(plan.policy))
    by_tier: dict[str, dict[str, float]] = {}
    for tier in TIERS:
        decode = vectors[tier][1] * shares
        kinds = {kind: 0.0 for kind in _KINDS}
        for at, name in enumerate(VARIABLES):
            kind, _, home = name.partition(".")
            kinds[kind if home == tier else "working set"] += float(decode[at])
        kinds["working set"] += float(decode[-1])
        by_tier[tier] = kinds
    return by_tier


def save_picture(plan: Plan, file: Path) -> None:
    """Write the picture as PNG. Raises PlanError where it cannot."""
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    memory, timeline = figure.subplots(2, 1)
    _draw_memory(plan, memory)
    _draw_step(plan, timeline)
    figure.suptitle(f"{plan.machine.name}: {plan.prediction.tokens_per_second:.3g} token/s, "
                    f"{plan.policy.num_batches} x {plan.policy.batch_size} sequences")  # fmt: skip
    _save(figure, file)


def save_curve(plans: Sequence[Plan], file: Path) -> None:
    """Draw tokens a second of plans against the seconds of their blocks, as PNG. Raises PlanError where it cannot."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    seconds = [plan.prediction.seconds for plan in plans]
    speeds = [plan.prediction.tokens_per_second for plan in plans]
    axes.loglog(seconds, speeds, marker="o", color=_COLOURS["weights"])
    for plan, x, y in zip(plans, seconds, speeds, strict=True):
        axes.annotate(str(plan.policy.block_size), (x, y), textcoords="offset points", xytext=(6, -10))
    axes.set(xlabel="seconds until all tokens of a block are there", ylabel="tokens a second")
    work = plans[0].workload
    axes.set_title(f"{plans[0].machine.name}: sequences at once, {work.prompt_tokens} + {work.new_tokens} tokens each")
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    try:
        with replace_file(file) as out:
            figure.savefig(out, format="png", dpi=120)
    except OSError as error:
        raise PlanError(f"{file} must be writable for the picture: {error.strerror}") from error


def _draw_memory(plan: Plan, axes: Any) -> None:
    sizes = tier_bytes(plan)
    tiers = [tier for tier in TIERS if plan.peaks[tier].limit_bytes]
    left = [0.0] * len(tiers)
    for kind in _KINDS:
        widths = [sizes[tier][kind] / plan.peaks[tier].limit_bytes for tier in tiers]
        axes.barh(tiers, widths, left=left, label=kind, color=_COLOURS[kind])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for at, tier in enumerate(tiers):
        peak = plan.peaks[tier]
        axes.text(1.01, at, f"{peak.peak_bytes / 1e9:.3g} of {peak.limit_bytes / 1e9:.3g} GB", va="center")
    axes.set(xlim=(0, 1.2), xlabel="fraction of the tier's budget in decode", title="where every byte lies")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(_KINDS), frameon=False)


def _draw_step(plan: Plan, axes: Any) -> None:
    """Each term of an average step, over the layers: with overlap they start together, else one after another."""
    steps = max(plan.workload.new_tokens - 1, 1)
    terms = {name: seconds / steps for name, seconds in plan.prediction.decode.items() if seconds > 0}
    start = 0.0
    for name, seconds in sorted(terms.items(), key=lambda term: -term[1]):
        axes.barh([name], [seconds], left=[start], color="#4878a8")
        start += 0.0 if plan.policy.overlap else seconds
    whole = plan.prediction.decode_s / steps
    axes.axvline(whole, color="#c04040")
    axes.set(xlabel=f"seconds of one step of decode, all layers; the line is the step, {whole:.3g} s", title="one step")
    axes.invert_yaxis()
