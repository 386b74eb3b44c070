"""Rules: one step of an optimizer as scalars, everything that is the same for all parameters."""

from nearflash.abi.rules.adagrad import AdagradStep
from nearflash.abi.rules.adam import AdamStep
from nearflash.abi.rules.base import OptimizerStep, Profile
from nearflash.abi.rules.lion import LionStep
from nearflash.abi.rules.sgd import SgdStep
from nearflash.abi.rules.state import BLOCK_PARAMS, StateFormat

__all__ = [
    "BLOCK_PARAMS",
    "OPTIMIZERS",
    "AdagradStep",
    "AdamStep",
    "LionStep",
    "OptimizerStep",
    "Profile",
    "SgdStep",
    "StateFormat",
]

OPTIMIZERS = tuple(rule.optimizer for rule in (AdamStep, SgdStep, AdagradStep, LionStep))
"""Names of the rules."""
