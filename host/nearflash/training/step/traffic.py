"""Bytes that the optimizer moved over each link, beside what conventional offload would move.

Conventional offload keeps p, m and v on flash and updates on the host's CPU: each step reads and writes all three
over the host link, 24 bytes a parameter. Where it keeps gradients on flash too they are written and read back once,
8 more bytes in fp32.

Source: Smart-Infinity (HPCA 2024), section 3; ZeRO-Infinity's optimizer offload.
"""

import threading
from dataclasses import dataclass, field

from nearflash.abi.formats import FP32

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """Totals since the optimizer was made, over all devices. Padding between tensors is counted where it was moved.

    Bytes and counters are of attempts that were discarded, too: of a step that failed or that backward began wrongly.
    """

    steps: int = 0
    params: int = 0
    """Parameters updated, summed over the committed steps, padding included."""
    to_device_bytes: int = 0
    """Over the host link down: gradients, and what compression left out of them, where that is saved."""
    from_device_bytes: int = 0
    """Over the host link up: parameters or their low-precision copy."""
    flash_read_bytes: int = 0
    flash_written_bytes: int = 0
    delta_bytes: int = 0
    """What the steps changed, as it is kept for `delta`: values, indices, headers."""
    counters: dict[str, int] = field(default_factory=dict)
    """Sums of the devices' counters (abi.counters), as far as they have them."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def host_link_bytes(self) -> int:
        """Both directions of the host link."""
        return self.to_device_bytes + self.from_device_bytes

    @property
    def conventional_bytes(self) -> int:
        """Bytes that conventional offload moves over the host link for the same updates: p, m and v, each way."""
        return self.params * 2 * 3 * FP32.bytes

    @property
    def conventional_bytes_with_gradients(self) -> int:
        """The same where gradients are kept on flash as well: fp32, written once and read once."""
        return self.conventional_bytes + self.params * 2 * FP32.bytes

    def add(self, counters: dict[str, int] | None = None, **moved: int) -> None:
        """Add bytes and parameters to the fields of those names, and one command's counters; from any thread."""
        with self._lock:
            for name, value in moved.items():
                setattr(self, name, getattr(self, name) + value)
            for name, value in (counters or {}).items():
                self.counters[name] = self.counters.get(name, 0) + value
