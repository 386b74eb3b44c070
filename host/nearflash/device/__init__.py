"""Devices: one interface to the reference model, the host's fast path, and the simulated gateware."""

from nearflash.device.base import Buffer, Device, Identity
from nearflash.device.registry import available_devices, open_device

__all__ = ["Buffer", "Device", "Identity", "available_devices", "open_device"]
