"""The self test of a device's kernel, whichever it is."""

from collections.abc import Iterator

from nearflash.device.base import Device
from nearflash.device.selftest.attend import compare_heads
from nearflash.device.selftest.comparison import Comparison
from nearflash.device.selftest.update import compare_updates

__all__ = ["compare"]


def compare(device: Device, *, seed: int, params: int, tokens: int) -> Iterator[Comparison]:
    """Random commands on a device against the model.

    params: parameters of each update; tokens: tokens times query heads of each head of attention.

    Raises CommandError for less than one of them, and what the device raises.
    """
    if device.identity.config.kernel == "attend":
        return compare_heads(device, tokens=tokens, seed=seed)
    return compare_updates(device, params=params, seed=seed)
