"""A training step with optimizer state on this machine's disk: DeepSpeed's, ours, and AdamW in memory as the ceiling.

    deepspeed-nvme           ZeRO-3, optimizer state on NVMe, update on the CPU (`make baseline`; nothing is flushed)
    nearflash-host           NearStorageAdamW on device host: every step durable before it returns
    nearflash-host-overlap   updates begin while backward runs: its optimizer seconds are what is left after it
    nearflash-host-resident  1 GiB of the state stays in memory between steps
    nearflash-host-mx8       moments in 8 bits
    nearflash-host-split-*   master split: half of it are the model's weights; moments in fp32, bf16 or 8 bits
    nearflash-host-split-mx8-*  as split-mx8 at the learning rate 1e-5 or 1e-6, of whose weights fewer change
    nearflash-host-delta     as mx8 at learning rate 1e-5; which bf16 weights changed comes back, not all of them
    nearflash-host-topk      1 % of the gradient, error feedback
    nearflash-host-all       overlap, and all of the state stays in memory between steps (2 GiB): it is only written
    torch-memory             fp32 masters and moments in memory, torch's fused AdamW

Each case is a process of its own, trains the same bf16 model on the same batches (subject.py) and clips to the same
norm. Times are medians of STEPS steps behind one that does not count. The roofline, case `disk`: as many more steps of
nearflash-host, and after each the bytes that it reads and writes moved at once by the disk probe, in the same process:
from and to memory, as a step does, and once more within the processor's cache.

Link bytes are those between the host and what updates the state: of DeepSpeed all reads and writes, of nearflash
gradients and parameters, as with a device that reaches its flash by itself; device host has no such flash, and its disk
bytes (a column of their own) cross the host's link too.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from os import environ
from pathlib import Path
from typing import Annotated, Any

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import AdamStep, StateFormat
from nearflash.bench.options import Option, check_choices
from nearflash.training.preflight import Severity, StateSizes, preflight

__all__ = ["run"]

DEEPSPEED, OURS, BEST = "deepspeed-nvme", "nearflash-host", "nearflash-host-all"
SPLITS = (*(f"split-{form}" for form in StateFormat), "split-mx8-1e-5", "split-mx8-1e-6")
CASES = (
    DEEPSPEED, OURS, *(f"{OURS}-{way}" for way in ("overlap", "resident", "mx8", *SPLITS, "delta", "topk", "all")),
    "torch-memory",
)  # fmt: skip
SIZES = {"smollm2-135m": 135_000_000, "tiny": 16_000_000}
"""Shapes, with their parameters rounded up."""
MODES = ("step", "scale")
STEPS = 5
PATH_VARIABLE = "NEARFLASH_BENCH_PATH"
BASELINE = Path(environ.get("NEARFLASH_BASELINE", ".venv-deepspeed"))
"""Virtual environment that `make baseline` makes."""
TIMEOUT_S = 1800.0


def run(
    parts: Annotated[
        Collection[str] | None, Option("Measure these cases (default: all).", many=True, choices=CASES)
    ] = None,
    size: Annotated[str, Option("Train a model of this shape.", choices=SIZES)] = "smollm2-135m",
    path: Annotated[
        Path | None,
        Option(
            "Measure the disk of this folder (default: $NEARFLASH_BENCH_PATH, else build/bench).",
            Path,
            metavar="FOLDER",
        ),
    ] = None,
    mode: Annotated[
        str, Option("Measure a model's step, or optimizer steps of 1, 2 and 3 billion parameters.", choices=MODES)
    ] = "step",
) -> Iterator[dict[str, Any]]:
    """Rows of the cases (the `parts`), of the roofline, and the ratios. Raises CommandError, StorageFullError.

    size: the model's; in mode `scale`, tiny is of 100, 200 and 400 million parameters. path: folder on the disk to be
    measured; else $NEARFLASH_BENCH_PATH, else build/bench.
    """
    cases = check_choices("parts", parts, CASES)
    check_choices("size", [size], SIZES)
    check_choices("mode", [mode], MODES)
    place = path or Path(environ.get(PATH_VARIABLE, "build/bench"))
    if mode == "scale":
        from nearflash.bench.training.scale import SIZES as ROWS
        from nearflash.bench.training.scale import scale

        yield from scale(
            _folder(place, StateSizes(ROWS[size][-1], AdamStep(lr=0.0, step=1, state_format=StateFormat.MX8))),
            ROWS[size],
        )
        return
    folder = _folder(place, StateSizes(SIZES[size]))
    rows: dict[str, dict[str, Any]] = {}
    for case in cases:
        rows[case], interleaved = _measure_case(case, size, folder)
        yield rows[case]
        if interleaved:
            rows["disk"] = _disk(interleaved, rows[case])
            yield rows["disk"]
    yield _ratios(rows)


def _folder(folder: Path, sizes: StateSizes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for finding in preflight(folder, sizes, measure=False):
        if finding.level is Severity.ERROR:
            raise CommandError(f"path of the bench ({folder}): {finding.subject}: {finding.text}")
    return folder


def _measure_case(case: str, size: str, folder: Path) -> tuple[dict[str, Any], Sequence[tuple[float, float, float]]]:
    """A row, and of OURS the seconds of its steps, interleaved with the disk. The row states how to get DeepSpeed."""
    python, module = sys.executable, "cases"
    if case == DEEPSPEED:
        python, module = str(BASELINE / "bin" / "python"), "deepspeed_case"
        if not (BASELINE / ".stamp").exists():
            text = f"DeepSpeed is not installed in {BASELINE}: make baseline"
            return {"case": case, "missing": text, "optimizer_seconds": None, "step_seconds": None}, ()
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        command = [python, "-m", f"nearflash.bench.training.{module}", case, "--path", inside, "--size", size]
        done = subprocess.run(
            [*command, "--steps", str(STEPS), *["--disk"][: case == OURS]],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CommandError(f"case {case!r} of the bench ended with status {done.returncode}: {last}")
    figures = json.loads(done.stdout.splitlines()[-1])
    per_param = {key: figures.pop(key) for key in ("link_bytes", "disk_read_bytes", "disk_written_bytes")}
    params, loss, interleaved = figures["params"], figures.pop("loss"), figures.pop("interleaved")
    row = {
        "case": case,
        **{key: value for key, value in figures.items() if not isinstance(value, list)},
        **_spread("optimizer_seconds", figures["optimizer_seconds"]),
        **_spread("step_seconds", figures["step_seconds"]),
        **{f"{key}_per_param": value and value / params for key, value in per_param.items()},
        "disk_bytes_per_param": (per_param["disk_read_bytes"] + per_param["disk_written_bytes"]) / params,
        "steps": STEPS,
        "last_loss": loss[-1],
        "durable": case not in (DEEPSPEED, "torch-memory"),
        "model": f"{size} shape, random weights, bf16, one sequence of 64 tokens",
        "unit": "s",
    }
    return row, interleaved


def _disk(interleaved: Sequence[tuple[float, float, float]], ours: dict[str, Any]) -> dict[str, Any]:
    read, written = (int(ours[f"disk_{way}_bytes_per_param"] * ours["params"]) for way in ("read", "written"))
    times = [disk for _, disk, _ in interleaved]
    return {
        "case": "disk",
        **_spread("optimizer_seconds", times),
        **_spread("in_cache_seconds", [cached for _, _, cached in interleaved]),
        **_spread("nearflash_seconds", [step for step, _, _ in interleaved]),
        **_spread("roofline_fraction", [disk / step for step, disk, _ in interleaved]),
        **_spread("roofline_fraction_in_cache", [cached / step for step, _, cached in interleaved]),
        "read_bytes": read,
        "written_bytes": written,
        "gigabytes_per_second": (read + written) / statistics.median(times) / 1e9,
        "of": "the bytes of a step of nearflash-host, read and written at once, flushed, interleaved with such steps; "
        "the fraction is the disk's seconds over those of the step before it; from and to memory, and in_cache with "
        "buffers that stay in the processor's cache, where a virtual drive is faster",
        "unit": "s",
    }


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: statistics.median(values), f"{name}_least": min(values), f"{name}_most": max(values)}


def _ratios(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The last object: fractions are None where a case is missing."""

    def ratio(over: str, under: str, what: str = "optimizer_seconds") -> float | None:
        numerator, denominator = (rows.get(case, {}).get(what) for case in (over, under))
        return numerator / denominator if numerator and denominator else None

    ours = [case for case in rows if case.startswith(OURS)]
    best = BEST if BEST in rows else OURS
    return {
        "speedup_optimizer_over_deepspeed": ratio(DEEPSPEED, best),
        "speedup_case": best,
        "host_peak_bytes_over_deepspeed": ratio(best, DEEPSPEED, "host_peak_bytes"),
        "disk_roofline_fraction": rows.get("disk", {}).get("roofline_fraction"),
        "disk_roofline_fraction_in_cache": rows.get("disk", {}).get("roofline_fraction_in_cache"),
        "speedup_optimizer_by_case": {case: ratio(DEEPSPEED, case) for case in ours},
        "speedup_step_by_case": {case: ratio(DEEPSPEED, case, "step_seconds") for case in ours},
        "link_bytes_per_param_by_case": {case: rows[case]["link_bytes_per_param"] for case in ours},
        "disk_bytes_per_param_by_case": {case: rows[case]["disk_bytes_per_param"] for case in ours},
        "optimizer_seconds_over_memory": ratio(OURS, "torch-memory"),
        "of": "medians of one run; disk_roofline_fraction is roofline_fraction of the case disk",
    }
