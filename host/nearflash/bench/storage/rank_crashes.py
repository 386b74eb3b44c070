"""Crash points of several ranks, each with a store of its own: what is found after power was lost on all of them.

A step is committed by every rank, in any order among them. After a crash ranks are one step apart at most, and those
that are ahead roll back: then all must be at one version, to the bit.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from nearflash.abi.errors import LostStepWarning, StateError
from nearflash.abi.optimizers import MasterFormat
from nearflash.bench.storage.crashes import Crashes, try_images
from nearflash.bench.storage.disk import Flush, LoggedDisk, Write
from nearflash.bench.storage.history import Event, Oracle, Version
from nearflash.storage.state.manifest import Manifest
from nearflash.storage.state.state_store import StateStore

__all__ = ["rank_crash_points"]


def rank_crash_points(
    folder: Path, *, ranks: int, steps: int, tries: int, seed: int, master: MasterFormat = MasterFormat.FP32
) -> Crashes:
    """Record a history of so many ranks in `folder`; try about `tries` images at each of its points."""
    run = _Run([folder / f"rank{rank}.state" for rank in range(ranks)], seed, master)
    crashes = try_images(run.disk, list(run.record(steps)), tries, seed, run.find_problem)
    crashes.bad = [f"{ranks} ranks, master {master}, seed {seed}, {wrong}" for wrong in crashes.bad]
    return crashes


class _Run:
    """Stores of ranks, whose shards differ in size."""

    def __init__(self, paths: Sequence[Path], seed: int, master: MasterFormat) -> None:
        self.disk, self._paths, self._rng = LoggedDisk(), paths, np.random.default_rng(seed)
        # Changes of weights are in whole blocks: they need extents of some.
        factor, dtype = (4, "bfloat16") if master is MasterFormat.SPLIT else (1, "float32")
        self._oracles = [
            Oracle(Manifest.pack([("matrix", (factor * (700 + 600 * rank),), dtype), ("norm", (30,), dtype)],
                                 factor * 1024, master=master))
            for rank in range(len(paths))
        ]  # fmt: skip

    def record(self, steps: int) -> Iterator[Event]:
        """Steps of all ranks; then one that the last rank does not commit, and the others undo when it is opened."""
        with ExitStack() as opened:
            stores = [opened.enter_context(oracle.create(StateStore, [path], self.disk)) for oracle, path in self._each]
            yield from self._drain(())
            yield Event(None, ((0, 0),))
            for number in range(steps):
                yield from self._step(stores, (number, 0), (number + 1, 0))
                yield Event(None, ((number + 1, 0),))
            yield from self._step(stores, (steps, 0), (steps + 1, 0), committed=len(stores) - 1)
        with ExitStack() as opened:
            stores = [opened.enter_context(self._open(path)) for path in self._paths]
            self._align(stores)
            yield from self._drain(((steps, 0),))
            yield from self._step(stores, (steps, 0), (steps + 1, 1))

    def find_problem(self, versions: Sequence[Version], crashes: Crashes) -> str | None:
        """See crashes.Check."""
        expected = list(versions or [(0, 0)])
        warnings.simplefilter("ignore", LostStepWarning)  # of superblocks that are torn
        try:
            with ExitStack() as opened:
                stores = [opened.enter_context(self._open(path)) for path in self._paths]
                apart = [store.steps for store in stores]
                if max(apart) - min(apart) > 1:
                    return f"ranks at the steps {apart}"
                self._align(stores)
                for version in expected:
                    if all(one.is_at(store, version) for one, store in zip(self._oracles, stores, strict=True)):
                        crashes.newer += len(expected) > 1 and version == expected[-1]
                        return None
                return f"at steps {apart}, then {stores[0].steps}, not exactly at one of {expected}"
        except StateError as error:
            return str(error) if versions else None  # a state whose creation was interrupted may be refused
        finally:
            self.disk.log.clear()

    @property
    def _each(self) -> Iterator[tuple[Oracle, Path]]:
        return zip(self._oracles, self._paths, strict=True)

    def _open(self, path: Path) -> StateStore:
        return StateStore.open([path], direct=False, backend=self.disk)

    def _step(
        self, stores: Sequence[StateStore], now: Version, new: Version, committed: int | None = None
    ) -> Iterator[Event]:
        """The first `committed` ranks commit it, all by default."""
        for oracle, store in zip(self._oracles, stores, strict=True):
            oracle.write(store, new)
        yield from self._drain((now,))
        parts = []
        for oracle, store in zip(self._oracles[:committed], stores, strict=False):
            oracle.commit(store, new)
            parts.append([event.what for event in self._drain(())])
        done = (now, new) if committed is None else (now,)
        order = self._rng.permutation([rank for rank, part in enumerate(parts) for _ in part])
        yield from (Event(parts[rank].pop(0), done) for rank in order)

    def _drain(self, versions: tuple[Version, ...]) -> Iterator[Event]:
        log: list[Write | Flush] = list(self.disk.log)
        self.disk.log.clear()
        return (Event(what, versions) for what in log)

    @staticmethod
    def _align(stores: Sequence[StateStore]) -> None:
        """As ranks do when they open their files (training.integrations.collective)."""
        steps = min(store.steps for store in stores)
        for store in stores:
            if store.steps > steps:
                store.rollback()
