"""accelerate: checkpoints of `Accelerator.save_state` with a snapshot of the state in them.

    model, optimizer = accelerator.prepare(model, NearStorageAdamW(model.parameters(), path=...))
    save_snapshots(accelerator, optimizer)

`accelerator.clip_grad_norm_` clips the gradients; the optimizer's `max_grad_norm` must be None then.
To resume: first `integrations.checkpoints.restore`, then the optimizer with resume=True, then
`accelerator.load_state`.
"""

from pathlib import Path
from typing import Any

from nearflash.training.integrations.checkpoints import FOLDER

__all__ = ["save_snapshots"]


def save_snapshots(accelerator: Any, optimizer: Any) -> None:
    """From now on `accelerator.save_state` takes a snapshot of this optimizer, prepared or not, along."""
    own = getattr(optimizer, "optimizer", optimizer)

    def save(_models: Any, _weights: Any, folder: str) -> None:
        own.store.snapshot(Path(folder) / FOLDER)

    accelerator.register_save_state_pre_hook(save)
