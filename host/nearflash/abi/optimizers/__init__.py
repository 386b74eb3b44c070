"""Rules: one step of an optimizer as scalars, everything that is the same for all parameters."""

from nearflash.abi.optimizers.adagrad import AdagradStep
from nearflash.abi.optimizers.adam import AdamStep
from nearflash.abi.optimizers.base import OptimizerStep, Profile
from nearflash.abi.optimizers.lion import LionStep
from nearflash.abi.optimizers.sgd import SgdStep
from nearflash.abi.optimizers.state import BLOCK_PARAMS, MasterFormat, StateFormat

__all__ = [
    "BLOCK_PARAMS",
    "OPTIMIZERS",
    "AdagradStep",
    "AdamStep",
    "LionStep",
    "MasterFormat",
    "OptimizerStep",
    "Profile",
    "SgdStep",
    "StateFormat",
]

OPTIMIZERS = tuple(rule.optimizer for rule in (AdamStep, SgdStep, AdagradStep, LionStep))
"""Names of the rules."""
