"""A folder of bitstreams for builds that no board has, so that drivers can be run on their simulation."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from nearflash.abi.config import CONFIGS
from nearflash.device.bitstreams.board import Resources
from nearflash.device.bitstreams.manifest import Manifest, sha256

__all__ = ["write_board"]

_BOARD = """format = "nearflash board"
version = 1
name = "{name}"
title = "simulated {name}"
part = "none"
family = "xc7"
flow = "{flow}"
backend = "{backend}"
clock_hz = 100_000_000
kernels = {kernels}
sources = []
memory = {{ base_address = 0, size_bytes = 1_073_741_824, bandwidth_bytes_per_s = 800_000_000 }}
resources = {{ lut = 1, ff = 1, dsp = 1, bram36 = 1 }}
"""


def write_board(root: Path, name: str, backend: str, files: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write `root/name`: a board whose builds, by kernel, have these files, by suffix, and manifests of them.

    The board's build of a kernel is the configuration `<kernel>-<name>`. Returns the folder.
    """
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    builds = {kernel: CONFIGS[f"{kernel}-{name}"] for kernel in files}
    kernels = json.dumps([build.full_name for build in builds.values()])
    flow = {"xrt": "vitis"}.get(backend, "open")
    (folder / "board.toml").write_text(_BOARD.format(name=name, backend=backend, kernels=kernels, flow=flow))
    for kernel, build in builds.items():
        sums = {}
        for suffix, contents in files[kernel].items():
            path = folder / f"{build.full_name}{suffix}"
            path.write_bytes(contents)
            sums[path.name] = sha256(path)
        manifest = Manifest(
            board=name, config=build.full_name, digest=build.digest, design=build.digest, git="0" * 40, tools={},
            files=sums, utilisation=Resources(0, 0, 0, 0), clock_hz=build.clock_hz, fmax_hz=0, critical_path=(),
            evidence="simulated",
        )  # fmt: skip
        (folder / f"{kernel}.json").write_text(json.dumps(asdict(manifest)))
    return folder
