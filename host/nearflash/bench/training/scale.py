"""Optimizer steps of models of growing size: the drive's rate, and host memory above weights and gradients.

Each size is a process of its own: bf16 tensors of 2^24 parameters, gradients in memory, moments in 8 bits, clipping;
no model runs. `python -m nearflash.bench.training.scale --params N --path FOLDER` is one of them and prints JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nearflash.abi.errors import CommandError
from nearflash.bench.training.measured import measure
from nearflash.storage.io.bandwidth import Probe
from nearflash.training import NearStorageAdamW

__all__ = ["SIZES", "main", "scale"]

SIZES = {"smollm2-135m": (1_000_000_000, 2_000_000_000, 3_000_000_000), "tiny": (100_000_000, 200_000_000, 400_000_000)}
"""Parameters of the rows, by the bench's size; `tiny` is the quick form."""
TENSOR_PARAMS = 1 << 24
STEPS = 3
PROBE_BYTES = 1 << 30
"""File in which the disk alone moves the bytes of a step, again and again."""
TIMEOUT_S = 3600.0


def scale(folder: Path, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each number of parameters, then how the peak of memory grows over them. Raises CommandError."""
    rows = []
    for params in sizes:
        with tempfile.TemporaryDirectory(dir=folder) as inside:
            command = [
                sys.executable,
                "-m",
                "nearflash.bench.training.scale",
                "--params",
                str(params),
                "--path",
                inside,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise CommandError(f"{params} parameters of the bench ended with status {done.returncode}: {last}")
        rows.append(_row(json.loads(done.stdout.splitlines()[-1])))
        yield rows[-1]
    above = [row["bytes_above_weights_and_gradients"] for row in rows]
    yield {
        "peak_growth": above[-1] / above[0] - 1,
        "of": f"bytes_above_weights_and_gradients of {rows[-1]['params']} parameters over those of {rows[0]['params']}",
    }


def _row(figures: dict[str, Any]) -> dict[str, Any]:
    params, moved = figures["params"], figures["disk_read_bytes"] + figures["disk_written_bytes"]
    steps = sorted(ours / disk for ours, disk in figures["interleaved"])
    seconds = sorted(figures["optimizer_seconds"])[STEPS // 2]
    above = figures["host_peak_bytes"] - figures["held_bytes"]
    return {
        "case": f"scale-{params / 1e9:g}b",
        "params": params,
        "optimizer_seconds": seconds,
        "ns_per_param": seconds / params * 1e9,
        "disk_bytes_per_param": moved / params,
        "gigabytes_per_second": moved / seconds / 1e9,
        "roofline_fraction": 1 / steps[len(steps) // 2],
        "bytes_above_weights_and_gradients": above,
        "bytes_above_per_param": above / params,
        "state_format": "mx8",
        "of": "roofline_fraction: seconds of the disk alone for the bytes of a step, interleaved, over the step's; "
        "peak of resident memory, with interpreter and libraries, less 4 bytes a parameter",
        "unit": "s",
    }


class Tensors:
    """bf16 parameters and gradients, which stay as they are."""

    def __init__(self, params: int, folder: Path) -> None:
        noise = torch.randn(TENSOR_PARAMS, generator=torch.Generator().manual_seed(0)).bfloat16()
        lengths = [min(TENSOR_PARAMS, params - first) for first in range(0, params, TENSOR_PARAMS)]
        self._tensors = [torch.nn.Parameter(noise[:length].clone()) for length in lengths]
        for tensor in self._tensors:
            tensor.grad = tensor.detach().clone()
        self.held_bytes = sum(2 * tensor.nbytes for tensor in self._tensors)
        self.optimizer = NearStorageAdamW(self._tensors, lr=1e-4, path=folder, state_format="mx8", max_grad_norm=1.0)

    @property
    def link_bytes(self) -> int:
        """Between host and device."""
        return self.optimizer.report.traffic.host_link_bytes

    def gradients(self, _: int) -> float:
        """They are there."""
        return 0.0

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--path", type=Path, required=True, help="folder for the state, which the caller removes")
    arguments = parser.parse_args(argv)
    subject = Tensors(arguments.params, arguments.path)
    with subject.optimizer:
        measured = measure(subject, arguments.params, STEPS)
        interleaved = []
        with Probe(arguments.path, PROBE_BYTES) as probe:
            probe.write(probe.size_bytes)
            for _ in range(STEPS):
                start = time.perf_counter()
                subject.update()
                ours = time.perf_counter() - start
                disk = probe.both(int(measured.disk_read_bytes), int(measured.disk_written_bytes))
                interleaved.append((ours, disk))
    print(json.dumps(measured.to_json() | {"held_bytes": subject.held_bytes, "interleaved": interleaved}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
