"""Parts of the time of a decode step, from the rows of the bench.

nearflash bench generate --json > rows.jsonl; python -m nearflash.bench.inference.latency rows.jsonl
docs/results/latency.png

A step is appending the new tokens, attending, and the rest: the matrices of the model, and waits of full-kv for its
reads. Reading runs in threads beside these and is drawn beside them.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nearflash.support.files import PUBLIC_MODE, replace_file

__all__ = ["breakdown", "main"]

REST, READ = "model and waits", "read"


def breakdown(row: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step of the row by phase: they add up to the step, but `read`, which is beside them."""
    phases = {name: 1e3 * seconds for name, seconds in row["seconds_of_a_step"].items()}
    read = phases.pop(READ, 0.0)
    step = 1e3 * row["batch"] / row["tokens_per_second"]
    return {REST: max(step - sum(phases.values()), 0.0), **phases, READ: read}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the rows of the file named first into the image named second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows_path, image_path = sys.argv[1:] if argv is None else argv
    rows = [row for row in map(json.loads, Path(rows_path).read_text().splitlines()) if "seconds_of_a_step" in row]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    colours = {REST: "0.75", "append": "tab:green", "attend": "tab:blue", READ: "tab:orange"}
    figure, axes = pyplot.subplots(1, len(parts), figsize=(4.5 * len(parts), 3), squeeze=False, layout="constrained")
    for axis, part in zip(axes[0], parts, strict=True):
        mine = [row for row in rows if row["part"] == part]
        for position, row in enumerate(mine):
            start = 0.0
            for name, milliseconds in breakdown(row).items():
                low, beside = (position + 0.22, 0.0) if name == READ else (position - 0.1, start)
                axis.barh(low, milliseconds, height=0.2 if name == READ else 0.4, left=beside, color=colours[name])
                start += milliseconds
        axis.set(title=f"{part}: {mine[0]['context']:,} tokens, batch {mine[0]['batch']}", xlabel="ms of a decode step")
        axis.set_yticks(range(len(mine)), [row["case"] for row in mine])
        axis.invert_yaxis()
    figure.legend(
        [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()],
        [f"{name}, beside the rest" if name == READ else name for name in colours],
        loc="outside lower center", ncols=len(colours), fontsize=7,
    )  # fmt: skip
    with replace_file(Path(image_path), mode=PUBLIC_MODE) as out:
        figure.savefig(out, format="png", dpi=90)


if __name__ == "__main__":
    main()
