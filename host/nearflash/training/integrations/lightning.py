"""Lightning: checkpoints of its Trainer with a snapshot of the state beside them.

    def configure_optimizers(self):
        return NearStorageAdamW(self.parameters(), path="/nvme/state", resume="auto")

    trainer = Trainer(callbacks=[LightningSnapshots("/nvme/state", "run/snapshots")])
    trainer.fit(module, data, ckpt_path=None)  # or a checkpoint: the run goes on from its step

`lightning` and `pytorch_lightning` are both taken. Snapshots of checkpoints that Lightning removes (save_top_k) stay
until their folders are removed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from nearflash.abi.errors import StateError
from nearflash.training.integrations.checkpoints import restore, save
from nearflash.training.integrations.collective import CollectiveOptimizer
from nearflash.training.optimizers.optimizer import NearStorageOptimizer

__all__ = ["LightningSnapshots"]

_KEY = "nearflash_snapshot"
_OPEN: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Optimizers by path: a Trainer leaves its optimizer open."""


class LightningSnapshots(Callback):
    """Takes a snapshot, `folder`/step-N, with each checkpoint, which is the state before a fit from that checkpoint.

    path: of the optimizer on this rank, one a device. A fit closes the optimizer of the fit before, in this process.
    """

    def __init__(self, path: str | Path | Sequence[str | Path], folder: str | Path) -> None:
        self._path, self._folder = path, Path(folder)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the snapshot, on every rank. Raises StateError, StorageFullError; there is no checkpoint then."""
        if "optimizer_states" not in checkpoint:
            return  # of the weights only
        if len(found := _list_optimizers(trainer)) != 1:
            raise StateError(f"a Trainer must have one near-storage optimizer for its snapshots, not {len(found)}")
        folder = self._folder / f"step-{trainer.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        save(found[0], folder)
        checkpoint[_KEY] = folder.name

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the snapshot in the place of the state, which is opened after this. Raises as `checkpoints.restore`."""
        if str(trainer.state.fn) in ("fit", "TrainerFn.FITTING"):
            if _KEY not in checkpoint:
                raise StateError(
                    "a checkpoint must have been saved with a snapshot to resume: pass LightningSnapshots to both runs"
                )
            devices = 1 if isinstance(self._path, str | Path) else len(self._path)
            rank = trainer.global_rank if trainer.world_size > 1 else None
            restore(self._folder / checkpoint[_KEY], self._path, devices=devices, rank=rank)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the optimizer of the fit before, whose files this one opens."""
        if stage == "fit" and (earlier := _OPEN.pop(str(self._path), None)) is not None:
            earlier.close()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the optimizer."""
        for optimizer in _list_optimizers(trainer):
            _OPEN[str(self._path)] = optimizer


def _list_optimizers(trainer: Any) -> list[Any]:
    return [one for one in trainer.optimizers if isinstance(one, NearStorageOptimizer | CollectiveOptimizer)]
