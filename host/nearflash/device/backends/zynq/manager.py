"""The kernel's FPGA manager: loads a bitstream into the logic of a Zynq-7000.

A firmware file and two attributes of /sys/class/fpga_manager/fpga0: `flags` (0: the whole device) and `firmware` (the
file's name, below /lib/firmware; writing it loads the file). They are of AMD's kernels (linux-xlnx); others load by
device-tree overlays alone. The file has a .bit's configuration data with the bytes of each 32-bit word reversed.

Source: AMD Linux drivers, "FPGA programming using sysfs attributes"; Linux, drivers/fpga/zynq-fpga.c (the sync word)
and Documentation/ABI/testing/sysfs-class-fpga-manager (states).
"""

from pathlib import Path

import numpy as np

from nearflash.abi.errors import BitstreamError, DeviceError, UnknownDeviceError
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["FIRMWARE_NAME", "FpgaManager", "swap_words"]

FIRMWARE_NAME = "nearflash-logic.bin"
"""The file that is loaded, replaced at each load."""
_SYNC = bytes.fromhex("aa995566")
_FULL, _OPERATING = "0", "operating"


def swap_words(payload: bytes) -> bytes:
    """A .bit's configuration data as the manager wants it.

    Raises BitstreamError for data that is not whole words with the sync word among them.
    """
    words = np.frombuffer(payload, ">u4") if len(payload) % 4 == 0 else np.zeros(0, ">u4")
    if int.from_bytes(_SYNC, "big") not in words:
        raise BitstreamError(
            f"configuration data must be whole 32-bit words with {_SYNC.hex()} among them, not {len(payload)} bytes "
            "without"
        )
    return words.astype("<u4").tobytes()


class FpgaManager:
    """The manager whose attributes lie in `folder`, with firmware files in `firmware`.

    Raises UnknownDeviceError where this kernel has none that loads files.
    """

    def __init__(self, folder: Path, firmware: Path) -> None:
        self._folder, self._firmware = folder, firmware
        if not (folder / "firmware").exists():
            what = "an FPGA manager" if not folder.exists() else "the attribute `firmware` of its FPGA manager"
            raise UnknownDeviceError(
                f"device 'zynq' needs {what}, {folder / 'firmware'}: boot a kernel with CONFIG_FPGA_MGR_ZYNQ_FPGA, "
                "such as AMD's linux-xlnx"
            )

    def load(self, payload: bytes) -> None:
        """Configure the logic with a .bit's data.

        Raises BitstreamError as `swap_words`, DeviceError where this user may not or the manager does not end in the
        state `operating`.
        """
        swapped = swap_words(payload)
        try:
            self._firmware.mkdir(parents=True, exist_ok=True)
            write_durably(self._firmware / FIRMWARE_NAME, swapped, mode=PUBLIC_MODE)
            (self._folder / "flags").write_text(_FULL)
            (self._folder / "firmware").write_text(FIRMWARE_NAME)
            state = (self._folder / "state").read_text().strip()
        except OSError as error:
            raise DeviceError(
                f"{error.filename or self._folder} must be written by root to load a bitstream, not fail "
                f"({error.strerror}): use `sudo`, and see `dmesg`"
            ) from error
        if state != _OPERATING:
            raise DeviceError(
                f"{self._folder / 'state'} must be {_OPERATING!r} behind a load, not {state!r}: see `dmesg`"
            )
