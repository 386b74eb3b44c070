"""Behaviour of an optimizer where a training script uses it as torch's: `python -m nearflash.training.checks`.

Each behaviour runs on a small model with torch's own optimizer and with the one under test. Both give the same tensors
(fp32, rtol 1e-5), or the one under test rejects the use with a named error, or it differs.
"""

import warnings
from dataclasses import dataclass

import torch

from nearflash.abi.errors import NearflashError
from nearflash.training.checks import edits  # noqa: F401 - its behaviours are noted when it is imported
from nearflash.training.checks.behaviours import BEHAVIOURS, Factory, ScriptRun

__all__ = ["BEHAVIOURS", "BehaviourResult", "compare", "conformance"]


@dataclass(frozen=True)
class BehaviourResult:
    """One behaviour, and what came of it."""

    behaviour: str
    outcome: str
    """`as torch`, `rejected` or `differs`."""
    detail: str = ""
    """The message of an error, or how it differs."""


def conformance(optimizer_factory: Factory, reference: Factory) -> list[BehaviourResult]:
    """A row for each behaviour. optimizer_factory: of the optimizer under test; reference: of torch's own.

    Both are called with new parameters each time, of 108 elements in all; optimizers with a `close` are closed.
    """
    return [BehaviourResult(text, *compare(text, optimizer_factory, reference)) for text in BEHAVIOURS]


def compare(text: str, optimizer_factory: Factory, reference: Factory) -> tuple[str, str]:
    """Outcome and detail of one behaviour."""
    behaviour, expected, tried = BEHAVIOURS[text], ScriptRun(reference), ScriptRun(optimizer_factory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        behaviour(expected)
        try:
            behaviour(tried)
        except NearflashError as error:
            return "rejected", str(error)
        except Exception as error:
            return "differs", repr(error)
        finally:
            if (close := getattr(tried.optimizer, "close", None)) is not None:
                close()
    for index, (tensor, wanted) in enumerate(zip(tried.tensors, expected.tensors, strict=True)):
        if not torch.allclose(tensor, wanted, rtol=1e-5, atol=1e-6):
            return "differs", f"tensor {index} by up to {float((tensor - wanted).detach().abs().max()):.3g}"
    return "as torch", ""
