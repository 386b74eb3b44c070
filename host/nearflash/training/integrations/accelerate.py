"""accelerate: checkpoints of `Accelerator.save_state` with a snapshot of the state in them.

    model, optimizer = accelerator.prepare(model, NearStorageAdamW(model.parameters(), path=...))
    save_snapshots(accelerator, optimizer)

`accelerator.clip_grad_norm_` clips the gradients; the optimizer's `max_grad_norm` must be None then.
To resume: first `integrations.checkpoints.restore`, then the optimizer with resume=True, then
`accelerator.load_state`.
"""

from pathlib import Path
from typing import Any

from nearflash.training.integrations.checkpoints import save

__all__ = ["save_snapshots"]


def save_snapshots(accelerator: Any, optimizer: Any) -> None:
    """From now on `accelerator.save_state` takes a snapshot of this optimizer, prepared or not, along.

    Saving into the same folder again replaces the snapshot.
    """
    near_storage = getattr(optimizer, "optimizer", optimizer)
    accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: save(near_storage, Path(folder)))
