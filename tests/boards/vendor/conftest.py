"""Packages of kernels that have the ports of real ones and nothing inside: what scripts name is ports and registers."""

import pytest
from amaranth import Module
from amaranth.lib import wiring

from nearflash.abi.kernel.config import CONFIGS
from nearflash.boards.design.kernels import kernel_of
from nearflash.boards.vendor.kernel import KernelDesign, convert_kernel, flatten
from nearflash.boards.vendor.package import write_package
from nearflash.device.bitstreams import load_board


class Shell(wiring.Component):
    """The members of a kernel."""

    def elaborate(self, platform: object) -> Module:
        return Module()


def shell_of(name: str) -> KernelDesign:
    """The kernel of a build configuration with its ports, without its logic."""
    build = CONFIGS[name]
    kernel = kernel_of(build)
    kernel._MustUse__used = True  # only its members are wanted
    flat = flatten(Shell(kernel.signature), build.kernel, {"git_revision": 0})
    return KernelDesign(flat.top, flat.pins, flat.rtlil, build)


@pytest.fixture(scope="package")
def packages(tmp_path_factory):
    """The package of each vendor board, and its designs."""
    made = {}
    for name in ("ku3p", "smartssd", "zynq7045", "zu17eg"):
        board = load_board(name)
        designs = [shell_of(kernel) for kernel in board.kernels]
        folder = tmp_path_factory.mktemp(name)
        made[name] = (board, designs, folder, write_package(board, designs, folder))
    return made


@pytest.fixture(scope="package")
def expand_tiny():
    """A whole kernel, elaborated."""
    return convert_kernel(CONFIGS["expand-tiny"])


@pytest.fixture(scope="package")
def shell():
    """The kernel of a build configuration by its name, with nothing inside."""
    return shell_of
