"""torch optimizers whose state lives on flash and is updated by a near-storage device."""

from nearflash.training.optimizer import NearStorageAdamW
from nearflash.training.timeline import Timeline
from nearflash.training.traffic import Traffic

__all__ = ["NearStorageAdamW", "Timeline", "Traffic"]
