"""Packed matrices expanded on a device of the `expand` kernel."""

from typing import Any

from numpy.typing import NDArray

from nearflash.abi.bitmap import HEADER_BYTES, BitmapHeader
from nearflash.device import Device, open_device
from nearflash.device.drivers.expand import expand_matrix
from nearflash.weights.arrays import values

__all__ = ["expand"]


def expand(stream: bytes, device: str | Device = "host") -> NDArray[Any]:
    """The dense matrix (rows, columns) of what `pack` gave.

    Of float16 or int8, or, for bf16, uint16 bit patterns (`torch.from_numpy(matrix).view(torch.bfloat16)`).

    device: a name for `open_device`, or an open Device, which stays open.

    Raises StreamError for a stream that is damaged, UnknownDeviceError, and what the device raises.
    """
    header = BitmapHeader.unpack(stream[:HEADER_BYTES], len(stream))
    if isinstance(device, Device):
        return values(expand_matrix(device, stream).dense, header.dense)
    with open_device(device, "expand") as opened:
        return values(expand_matrix(opened, stream).dense, header.dense)
