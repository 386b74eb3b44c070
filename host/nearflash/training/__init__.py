"""torch optimizers whose state lives on flash and is updated by near-storage devices."""

from nearflash.training.compression import TopK
from nearflash.training.optimizer import NearStorageOptimizer
from nearflash.training.optimizers import (
    NearStorageAdagrad,
    NearStorageAdam,
    NearStorageAdamW,
    NearStorageLion,
    NearStorageSGD,
)
from nearflash.training.scaler import LossScale
from nearflash.training.stalls import Stalls
from nearflash.training.timeline import Timeline
from nearflash.training.traffic import Traffic

__all__ = [
    "LossScale",
    "NearStorageAdagrad",
    "NearStorageAdam",
    "NearStorageAdamW",
    "NearStorageLion",
    "NearStorageOptimizer",
    "NearStorageSGD",
    "Stalls",
    "Timeline",
    "TopK",
    "Traffic",
]
