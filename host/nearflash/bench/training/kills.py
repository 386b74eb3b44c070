"""Training that is killed again and again: `python -m nearflash.bench.training.kills FOLDER --kills 50`.

A child trains a small model and is killed (SIGKILL) after a random number of steps and a random delay. What its state
files then hold is compared with the same step of a run that nobody killed; the next child goes on from it, and what it
computes is compared step by step. Children are forked from a process that has torch loaded. Prints a Kills as JSON.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nearflash.abi.errors import NearflashError
from nearflash.storage import StateStore
from nearflash.training import NearStorageAdamW

__all__ = ["Digests", "Kills", "campaign", "digest_of", "main", "warm_up"]

STEPS = 60
"""Of a whole run; then the next one begins."""
Digests = tuple[int, int]
"""Of the stored arrays and of the model's tensors."""


@dataclass
class Kills:
    """How many children were killed, and what was wrong after some of them."""

    kills: int = 0
    runs: int = 0
    """Runs that came to their end, killed on their way."""
    bad: list[str] = field(default_factory=list)


class Child:
    """A process that trains on the state files at `paths` up to step STEPS and announces every step."""

    def __init__(self, paths: Sequence[Path]) -> None:
        source, sink = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(source)
            _train(paths, sink)
        os.close(sink)
        self._lines = os.fdopen(source)

    def read_announced(self, steps: int | None) -> dict[int, Digests]:
        """The next so many steps, or all to the end."""
        digests: dict[int, Digests] = {}
        while steps is None or len(digests) < steps:
            line = self._lines.readline()
            if not line.endswith("\n"):
                break
            step, arrays, tensors = map(int, line.split())
            digests[step] = arrays, tensors
        return digests

    def kill(self) -> tuple[dict[int, Digests], bool]:
        """Kill it; what it had announced until then, and whether it had been faster and come to its end."""
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        with self._lines:
            return self.read_announced(None), not os.WIFSIGNALED(status)


def campaign(folder: Path, kills: int, seed: int, files: int) -> Kills:
    """Kill so many children that train on so many state files in `folder`."""
    warm_up(folder / "warm")
    whole = Child([folder / f"whole-{index}" for index in range(files)])
    expected = whole.read_announced(None)
    whole.kill()
    rng, result, last = np.random.default_rng(seed), Kills(), 0
    paths = [folder / f"killed-{index}" for index in range(files)]
    if sorted(expected) != list(range(STEPS + 1)):
        result.bad.append(f"the run that nobody killed announced the steps {sorted(expected)}")
    while result.kills < kills and not result.bad:
        child = Child(paths)
        announced = child.read_announced(int(rng.integers(0, 12)))
        time.sleep(float(rng.uniform(0, 0.02)))
        rest, ended = child.kill()
        announced |= rest
        problems = [f"step {step} differs" for step in announced if announced[step] != expected.get(step)]
        last = max([last, *announced])
        problems += [problem] if (problem := _problem(paths, expected, last)) else []
        if ended and last < STEPS:
            problems.append("the child gave up")
        result.bad += [f"kill {result.kills} of seed {seed}, after step {last}: {problem}" for problem in problems]
        if ended:
            for path in paths:
                path.unlink(missing_ok=True)
            result.runs, last = result.runs + 1, 0
        else:
            result.kills += 1
    last_child = Child(paths)
    rest = last_child.read_announced(None)
    last_child.kill()
    if not rest or any(expected.get(step) != value for step, value in rest.items()) or STEPS not in rest:
        result.bad.append(f"seed {seed}: what was resumed last is not at step {STEPS} of the run that nobody killed")
    result.runs += 1
    return result


def warm_up(path: Path) -> None:
    """Load what children would each load again, above all torch's compiler; no autograd: its threads do not fork."""
    tensor = torch.nn.Parameter(torch.zeros(8))
    tensor.grad = torch.zeros(8)
    with NearStorageAdamW([tensor], **_where([path])) as optimizer:
        optimizer.step()


def _where(paths: Sequence[Path]) -> dict[str, Any]:
    """The optimizer's arguments for these files."""
    return {"path": paths, "device": ["host"] * len(paths)}


def _problem(paths: Sequence[Path], expected: dict[int, Digests], last: int) -> str | None:
    """Name what is wrong with the state file, after a child had announced step `last`."""
    if last == 0 and not any(path.exists() for path in paths):
        return None  # killed while it made the files
    try:
        with StateStore.open(paths) as store:
            if store.steps not in (last, last + 1):
                return f"the state file is at step {store.steps}"
            digest = digest_of(store.read_array(array.name) for array in store.manifest.arrays)
            return None if digest == expected[store.steps][0] else f"the state file's step {store.steps} differs"
    except NearflashError as error:
        return str(error)


def _train(paths: Sequence[Path], sink: int) -> None:
    """Train in a child; never returns."""
    try:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 100), torch.nn.Tanh(), torch.nn.Linear(100, 8))
        with NearStorageAdamW(model.parameters(), resume="auto", extent_params=1024, **_where(paths)) as optimizer:
            _announce(sink, optimizer, model)
            while optimizer.steps < STEPS:
                torch.manual_seed(optimizer.steps)
                optimizer.zero_grad()
                model(torch.randn(16, 32)).square().mean().backward()
                optimizer.step()
                _announce(sink, optimizer, model)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _announce(sink: int, optimizer: NearStorageAdamW, model: torch.nn.Module) -> None:
    arrays = digest_of(optimizer.store.read_array(array.name) for array in optimizer.store.manifest.arrays)
    tensors = digest_of(tensor.detach().numpy() for tensor in model.parameters())
    os.write(sink, f"{optimizer.steps} {arrays} {tensors}\n".encode())


def digest_of(arrays: Iterable[np.ndarray[Any, Any]]) -> int:
    """CRC-32 of the bytes of arrays, one behind the other."""
    digest = 0
    for array in arrays:
        digest = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, digest)
    return digest


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=1, help="of the state")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(json.dumps(asdict(campaign(arguments.folder, arguments.kills, arguments.seed, arguments.files))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
