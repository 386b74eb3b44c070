"""A recording as a picture: what the channels' buses do over time, and where the heads are meanwhile."""

from pathlib import Path
from typing import Any

import numpy as np

from nearflash.sim.trace.recording import BusState, Recording
from nearflash.sim.trace.spans import PHASES, channel_figures, head_spans
from nearflash.support.files import replace_file

__all__ = ["plot"]

_BINS = 100
_STATES = {BusState.DATA: ("page data", "#2b6ca3"), BusState.COMMAND: ("commands, status", "#7fb2d9"),
           BusState.WAIT: ("waits of ONFI", "#c9dff0")}  # fmt: skip
_PHASES = dict(zip(PHASES, ("#d9d9d9", "#f2b134", "#8c6bb1", "#3a9a5b", "#c0392b"), strict=True))


def plot(recording: Recording, path: Path) -> None:
    """Write the picture (PNG)."""
    from matplotlib.figure import Figure

    count = len(recording.channels)
    figure = Figure(figsize=(10, 1.4 * count + 0.27 * len(recording.ended) + 1.2), layout="constrained")
    rows = figure.subplots(count + 1, 1, sharex=True, height_ratios=[1] * count + [0.19 * len(recording.ended)])
    us = 1e6 / recording.clock_hz
    for number, axes in enumerate(rows[:-1]):
        _draw_channel(axes, recording, number, us)
    _draw_heads(rows[-1], recording, us)
    rows[0].legend(ncols=len(_STATES), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, borderpad=0)
    rows[-1].set_xlabel(f"time at {recording.clock_hz / 1e6:.0f} MHz, µs")
    with replace_file(path) as out:
        figure.savefig(out, format="png", dpi=90)


def _draw_channel(axes: Any, recording: Recording, number: int, us: float) -> None:
    """The bus's share of time in each state, and its mean in the middle of the batch."""
    middle = recording.middle
    size = max(1, recording.cycles // _BINS)
    part = recording.shares(number, size)
    axes.stackplot(
        (np.arange(len(part)) + 0.5) * size * us,
        *(100 * part[:, state] for state in _STATES),
        labels=[name for name, _ in _STATES.values()],
        colors=[colour for _, colour in _STATES.values()],
        step="mid",
    )
    for edge in (middle.start, middle.stop):
        axes.axvline(edge * us, color="black", linewidth=1, linestyle=":")
    figures = channel_figures(recording, number)
    axes.set_title(f"busy {100 * figures['busy']:.0f} % of the time between the dotted lines", loc="right", fontsize=9)
    axes.set(ylabel=f"channel {number}, %", ylim=(0, 105), xlim=(0, recording.cycles * us))


def _draw_heads(axes: Any, recording: Recording, us: float) -> None:
    """A bar a head, coloured by phase."""
    for head, phases in enumerate(head_spans(recording)):
        axes.broken_barh(
            [(span.begin * us, (span.end - span.begin) * us) for span in phases],
            (head - 0.4, 0.8),
            facecolors=[_PHASES[span.name] for span in phases],
        )
    for name, colour in _PHASES.items():
        axes.plot([], [], color=colour, linewidth=6, label=name)
    axes.legend(loc="lower left", ncols=len(_PHASES), fontsize="small")
    axes.set(ylabel="head", yticks=range(len(recording.ended)))
    axes.invert_yaxis()
