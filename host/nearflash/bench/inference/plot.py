"""Accuracy against flash bytes, from the rows of the bench.

nearflash bench accuracy --json > rows.jsonl; python -m nearflash.bench.inference.plot rows.jsonl
docs/results/accuracy.png
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearflash.support.files import PUBLIC_MODE, replace_file

__all__ = ["main", "points"]

Point = tuple[float, float, float]


def points(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[Point]]]:
    """(flash fraction, delta NLL in percent, its error), rising in the fraction, by mode, by model."""
    by_model: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        if "delta_nll_percent" in row and row["mode"] != "dense":
            error = row["delta_nll_percent_error"] or 0.0
            point = (row["flash_fraction"], row["delta_nll_percent"], error)
            by_model.setdefault(row["model"], {}).setdefault(row["mode"], []).append(point)
    return {model: {mode: sorted(drawn) for mode, drawn in modes.items()} for model, modes in by_model.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the rows of the file named first into the image named second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows_path, image_path = sys.argv[1:] if argv is None else argv
    models = points([json.loads(line) for line in Path(rows_path).read_text().splitlines()])
    figure, axes = pyplot.subplots(1, len(models), figsize=(4 * len(models), 3), squeeze=False, layout="constrained")
    for axis, (model, modes) in zip(axes[0], models.items(), strict=True):
        for mode, drawn in modes.items():
            fraction, delta, error = zip(*drawn, strict=True)
            axis.errorbar(fraction, delta, error, label=mode, marker="o", markersize=3, linewidth=1, capsize=2)
        axis.axhline(0, color="0.7", linewidth=0.8)
        axis.set(title=model, xlabel="flash bytes / dense", ylabel="ΔNLL, %", xlim=(0, 0.5), yscale="symlog")
        axis.legend(fontsize=7)
    with replace_file(Path(image_path), mode=PUBLIC_MODE) as out:
        figure.savefig(out, format="png", dpi=90)


if __name__ == "__main__":
    main()
