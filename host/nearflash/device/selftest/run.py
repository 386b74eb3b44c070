"""The self test of a device's kernel, whichever it is."""

from collections.abc import Iterator

from nearflash.device.base import Device
from nearflash.device.selftest.attend import compare_heads
from nearflash.device.selftest.comparison import Comparison
from nearflash.device.selftest.expand import compare_matrices
from nearflash.device.selftest.update import compare_updates

__all__ = ["compare"]


def compare(device: Device, *, seed: int, params: int, tokens: int, columns: int) -> Iterator[Comparison]:
    """Random commands on a device against the model.

    params: parameters of each update; tokens: tokens times query heads of each head of attention; columns: of each
    matrix.

    Raises CommandError for less than one of them, and what the device raises.
    """
    if device.identity.config.kernel == "attend":
        return compare_heads(device, tokens=tokens, seed=seed)
    if device.identity.config.kernel == "expand":
        return compare_matrices(device, columns=columns, seed=seed)
    return compare_updates(device, params=params, seed=seed)
