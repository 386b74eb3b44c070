"""torch optimizers whose state lives on flash and is updated by near-storage devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearflash.support.timeline import Timeline
    from nearflash.training.checks import conformance
    from nearflash.training.gradients.compression import TopK
    from nearflash.training.gradients.scaler import LossScale
    from nearflash.training.optimizers.adagrad import NearStorageAdagrad
    from nearflash.training.optimizers.adam import NearStorageAdam, NearStorageAdamW
    from nearflash.training.optimizers.lion import NearStorageLion
    from nearflash.training.optimizers.muon import NearStorageMuon
    from nearflash.training.optimizers.optimizer import NearStorageOptimizer
    from nearflash.training.optimizers.sgd import NearStorageSGD
    from nearflash.training.optimizers.store import OptimizerStore
    from nearflash.training.step.report import Report
    from nearflash.training.step.settings import Options
    from nearflash.training.step.stalls import Stalls
    from nearflash.training.step.traffic import Traffic

__all__ = [
    "LossScale",
    "NearStorageAdagrad",
    "NearStorageAdam",
    "NearStorageAdamW",
    "NearStorageLion",
    "NearStorageMuon",
    "NearStorageOptimizer",
    "NearStorageSGD",
    "OptimizerStore",
    "Options",
    "Report",
    "Stalls",
    "Timeline",
    "TopK",
    "Traffic",
    "conformance",
]

_MODULES = {
    "conformance": "checks",
    "LossScale": "gradients.scaler",
    "NearStorageAdagrad": "optimizers.adagrad",
    "NearStorageAdam": "optimizers.adam",
    "NearStorageAdamW": "optimizers.adam",
    "NearStorageLion": "optimizers.lion",
    "NearStorageMuon": "optimizers.muon",
    "NearStorageOptimizer": "optimizers.optimizer",
    "NearStorageSGD": "optimizers.sgd",
    "OptimizerStore": "optimizers.store",
    "Options": "step.settings",
    "Report": "step.report",
    "Stalls": "step.stalls",
    "Timeline": ".support.timeline",
    "TopK": "gradients.compression",
    "Traffic": "step.traffic",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the commands of this package are looked up by every `nearflash`, and must not load torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
