"""Loss against raw bit error rate, from the rows of the bench.

nearflash bench weights --parts errors --json > rows.jsonl; python -m nearflash.bench.weights.plot rows.jsonl errors.png
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from nearflash.support.files import PUBLIC_MODE, replace_file

__all__ = ["curves", "main"]

_LOST = 20.0
"""Nats at which a model is drawn whose loss is not finite, or which cannot be read."""


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """(rate, nats more, the mean over seeds), rising in the rate, by label, by model."""
    found: dict[str, dict[str, dict[float, list[float]]]] = {}
    for row in rows:
        if row.get("part") == "errors":
            label = f"{row['subject']} {row['form']}{', corrected' if row['corrected'] else ''}"
            increase = _LOST if row["loss_increase"] is None else min(row["loss_increase"], _LOST)
            found.setdefault(row["model"], {}).setdefault(label, {}).setdefault(row["bit_error_rate"], []).append(
                increase
            )
    return {
        model: {label: [(rate, fmean(points[rate])) for rate in sorted(points)] for label, points in labels.items()}
        for model, labels in found.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the rows of the file named first into the image named second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows_path, image_path = sys.argv[1:] if argv is None else argv
    models = curves([json.loads(line) for line in Path(rows_path).read_text().splitlines()])
    figure, axes = pyplot.subplots(1, len(models), figsize=(5 * len(models), 3.4), squeeze=False, layout="constrained")
    for axis, (model, labels) in zip(axes[0], models.items(), strict=True):
        for number, (label, points) in enumerate(labels.items()):
            style = "--" if label.endswith("corrected") else "-"
            axis.plot(*zip(*points, strict=True), style, label=label, color=f"C{number // 2}", marker="o", markersize=3)
        axis.set(title=model, xlabel="raw bit error rate", ylabel="nats a token more", xscale="log")
        axis.set_yscale("symlog", linthresh=1e-3)
        axis.legend(fontsize=6)
    with replace_file(Path(image_path), mode=PUBLIC_MODE) as out:
        figure.savefig(out, format="png", dpi=90)


if __name__ == "__main__":
    main()
