"""Arguments of the kernels as XRT counts them: the registers that the host writes, in the order of their offsets.

A pointer belongs to the memory port that its data go through, a scalar to the register block. kernel.xml lists them so,
and the index of an argument is what `xrt::kernel::group_id` takes.
"""

from dataclasses import dataclass

from nearflash.abi.fields import Access, Register, RegisterMap

__all__ = ["CONTROL_PORT", "KernelArgument", "kernel_arguments"]

CONTROL_PORT = "s_axi_control"
_POINTER_PORTS = {
    "update": {
        "g_address": 0, "copy_out_address": 0,
        "p_address": 1, "p_out_address": 1, "rest_address": 1, "rest_out_address": 1,
        **{f"{state}{part}_address": port for state, port in (("m", 2), ("v", 3))
           for part in ("", "_out", "_scale", "_scale_out")},
    },
    "attend": {"descriptors_address": 0, "completions_address": 0},
    "expand": {"in_address": 0, "out_address": 1},
}  # fmt: skip
"""Index of the memory port of each pointer, by kernel."""


@dataclass(frozen=True)
class KernelArgument:
    """One argument: its index, its register, and the port of its data."""

    index: int
    register: Register
    port: str
    """`m_axi_gmem0` and so on of a pointer, CONTROL_PORT of a scalar."""

    @property
    def is_pointer(self) -> bool:
        """Whether it is an address in device memory."""
        return self.port != CONTROL_PORT


def kernel_arguments(registers: RegisterMap) -> tuple[KernelArgument, ...]:
    """The arguments of the kernel that has this map, by index."""
    names = {name: f"m_axi_gmem{port}" for name, port in _POINTER_PORTS[registers.name].items()}
    written = (register for register in registers if register.access is Access.RW)
    return tuple(
        KernelArgument(index, register, names.get(register.name, CONTROL_PORT))
        for index, register in enumerate(written)
    )
