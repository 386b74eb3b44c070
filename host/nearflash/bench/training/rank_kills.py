"""Sharded training of which one rank is killed again and again: `python -m nearflash.bench.training.rank_kills FOLDER`.

Ranks (FSDP2 over gloo, a store each) train a small model. One of them is killed (SIGKILL) after a random number of
steps and a random delay; the others must end by themselves. Then every store must be at the step that was announced
last, or one step to either side, with the bits of a run that nobody killed; the next ranks must all begin at one step,
and each step that they make is compared with that run. Ranks are forked from a process that has torch loaded. Prints a
Kills as JSON.
"""

import argparse
import json
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nearflash.abi.errors import NearflashError
from nearflash.bench.training.kills import Digests, Kills, digest_of, warm_up
from nearflash.storage import StateStore
from nearflash.training.integrations.shards import ShardedOptimizer

__all__ = ["campaign", "main"]

STEPS = 40
"""Of a whole run; then the next one begins."""
TIMEOUT_S = 60.0
"""For ranks to begin, and to end once one of them is gone."""
Announced = dict[int, Digests]
"""By step, of the arrays that a rank stores and of its shards."""


class Rank:
    """A process that is one of several ranks and announces every step, as in kills.Child."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        source, sink = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(source)
            _train(rank, ranks, folder, sink)
        os.close(sink)
        os.set_blocking(source, False)
        self._source, self._text = source, b""
        self.announced: Announced = {}
        self.status: int | None = None
        """Once it has ended."""

    def listen(self, seconds: float) -> bool:
        """Take what it announces within so many seconds, or to its end; whether that has come."""
        if not select.select([self._source], [], [], max(seconds, 0))[0]:
            return False
        more = os.read(self._source, 1 << 16)
        *lines, self._text = (self._text + more).split(b"\n")
        for step, arrays, tensors in (map(int, line.split()) for line in lines):
            self.announced[step] = arrays, tensors
        return not more

    def end(self, deadline: float, *, kill: bool = False) -> bool:
        """Wait for its end; whether it came by itself, or was asked for, by a time of time.monotonic."""
        if kill:
            os.kill(self._pid, signal.SIGKILL)
        in_time = True
        while in_time and not self.listen(deadline - time.monotonic()):
            in_time = time.monotonic() < deadline
        if not in_time:
            os.kill(self._pid, signal.SIGKILL)
        self.status = os.waitpid(self._pid, 0)[1]
        os.close(self._source)
        return in_time


def campaign(folder: Path, kills: int, seed: int, ranks: int) -> Kills:
    """Kill so many times one of the ranks that train in `folder`."""
    warm_up(folder / "warm")
    rng, result = np.random.default_rng(seed), Kills()
    whole = _start(ranks, folder / "whole")
    late = [rank for rank, one in enumerate(whole) if not one.end(time.monotonic() + TIMEOUT_S)]
    expected = [one.announced for one in whole]
    if late or any(sorted(steps) != list(range(STEPS + 1)) for steps in expected):
        result.bad.append(f"the run that nobody killed announced the steps {[sorted(steps) for steps in expected]}")
    place, last = folder / "killed", 0
    while result.kills < kills and not result.bad:
        group = _start(ranks, place)
        problems, ended = _kill_one(group, int(rng.integers(ranks)), rng)
        problems += _compare([one.announced for one in group], expected)
        begun = {min(one.announced, default=-1) for one in group if one.announced}
        if len(begun) > 1 or (begun and not last - 1 <= min(begun) <= last + 1):
            problems.append(f"ranks begin at the steps {sorted(begun)} after step {last}")
        last = max([last, *(max(one.announced, default=0) for one in group)])
        problems += _find_problems(place, expected, last)
        result.bad += [f"kill {result.kills} of seed {seed}, {ranks} ranks, step {last}: {one}" for one in problems]
        result.kills += not ended
        if ended:
            for path in place.glob("*.state"):
                path.unlink()
            result.runs, last = result.runs + 1, 0
    if not result.bad:
        result.bad += [f"the last run of seed {seed}: {one}" for one in _finish(ranks, place, expected)]
        result.runs += 1
    return result


def _start(ranks: int, folder: Path) -> list[Rank]:
    folder.mkdir(exist_ok=True)
    (folder / "meet").unlink(missing_ok=True)
    return [Rank(rank, ranks, folder) for rank in range(ranks)]


def _kill_one(group: Sequence[Rank], victim: int, rng: np.random.Generator) -> tuple[list[str], bool]:
    """Kill a rank some time after it has begun; what was wrong, and whether it had come to its end before."""
    doomed, deadline = group[victim], time.monotonic() + TIMEOUT_S
    wanted, gone = int(rng.integers(1, 9)), False
    while len(doomed.announced) < wanted and not gone and time.monotonic() < deadline:
        gone = doomed.listen(deadline - time.monotonic())
    problems = [] if doomed.announced else [f"rank {victim} did not begin"]
    time.sleep(float(rng.uniform(0, 0.03)))
    doomed.end(deadline, kill=True)
    deadline = time.monotonic() + TIMEOUT_S
    others = [(rank, one) for rank, one in enumerate(group) if rank != victim]
    problems += [f"rank {rank} waits for rank {victim}, which is gone" for rank, one in others if not one.end(deadline)]
    ended = not os.WIFSIGNALED(doomed.status or 0)
    if ended and STEPS not in doomed.announced:
        problems.append(f"rank {victim} gave up")
    return problems, ended


def _compare(announced: Sequence[Announced], expected: Sequence[Announced]) -> list[str]:
    return [
        f"rank {rank}: step {step} differs"
        for rank, (mine, theirs) in enumerate(zip(announced, expected, strict=True))
        for step, digests in mine.items()
        if digests != theirs.get(step)
    ]


def _find_problems(folder: Path, expected: Sequence[Announced], last: int) -> list[str]:
    """Name what is wrong with the files, after some rank had announced step `last`."""
    problems, steps = [], []
    for rank, digests in enumerate(expected):
        path = folder / f"rank{rank}.state"
        if last == 0 and not path.exists():
            continue  # killed while it made the files
        try:
            with StateStore.open([path]) as store:
                steps.append(store.steps)
                mine = digest_of(store.read_array(array.name) for array in store.manifest.arrays)
                if mine != digests[store.steps][0]:
                    problems.append(f"rank {rank}'s file: step {store.steps} differs")
        except NearflashError as error:
            problems.append(f"rank {rank}'s file: {error}")
    if steps and (max(steps) - min(steps) > 1 or not last - 1 <= min(steps) <= last + 1):
        problems.append(f"the files are at the steps {steps}")
    return problems


def _finish(ranks: int, folder: Path, expected: Sequence[Announced]) -> list[str]:
    """Train to the end once more: all ranks must come there."""
    group = _start(ranks, folder)
    problems = [f"rank {rank} waits" for rank, one in enumerate(group) if not one.end(time.monotonic() + TIMEOUT_S)]
    problems += _compare([one.announced for one in group], expected)
    return problems + [f"rank {rank} ended early" for rank, one in enumerate(group) if STEPS not in one.announced]


def _train(rank: int, ranks: int, folder: Path, sink: int) -> None:
    """Train in a rank's process; never returns."""
    try:
        meet = f"file://{folder}/meet"
        distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(32, 100), torch.nn.Tanh(), torch.nn.Linear(100, 8))
        for layer in (*model, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = ShardedOptimizer(model.parameters(), path=folder, resume="auto", extent_params=1024, lr=1e-2)
        _announce(sink, optimizer, model)
        while optimizer.steps < STEPS:
            batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(ranks * optimizer.steps + rank))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            _announce(sink, optimizer, model)
        optimizer.close()
        distributed.barrier()
        os._exit(0)
    except BaseException as error:
        # A rank that is gone is an error of gloo, or of ours; at its own end a process group would wait for it.
        if not isinstance(error, NearflashError | RuntimeError):
            print(f"rank {rank}: {error!r}", file=sys.stderr)
        os._exit(1)


def _announce(sink: int, optimizer: ShardedOptimizer, model: torch.nn.Module) -> None:
    store = optimizer.local.store
    arrays = digest_of(store.read_array(array.name) for array in store.manifest.arrays)
    shards = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    tensors = digest_of(shard.detach().numpy() for shard in shards)
    os.write(sink, f"{optimizer.steps} {arrays} {tensors}\n".encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign in a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(json.dumps(asdict(campaign(arguments.folder, arguments.kills, arguments.seed, arguments.ranks))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
