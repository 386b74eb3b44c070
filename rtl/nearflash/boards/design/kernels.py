"""The kernel of a build configuration."""

from typing import Any

from nearflash.abi.kernel.config import AttendConfig, ExpandConfig, KernelConfig, UpdateConfig
from nearflash.gateware.top.attend import AttendKernel
from nearflash.gateware.top.expand import ExpandKernel
from nearflash.gateware.top.update import UpdateKernel

__all__ = ["kernel_of"]

_KERNELS: dict[type[KernelConfig], Any] = {
    UpdateConfig: UpdateKernel, AttendConfig: AttendKernel, ExpandConfig: ExpandKernel,
}  # fmt: skip


def kernel_of(build: KernelConfig) -> Any:
    """The top component of a build: `s_axi_control`, `m_axi_gmem0` and so on, `interrupt`, `git_revision`."""
    return _KERNELS[type(build)](build)
