"""Arguments of kernels: every register that the host writes, every pointer with the port of its data."""

import pytest

from nearflash.abi.fields import Access
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.kernel_arguments import CONTROL_PORT, kernel_arguments
from nearflash.abi.registers import ALL_REGISTERS

each_kernel = pytest.mark.parametrize("registers", ALL_REGISTERS.values(), ids=ALL_REGISTERS)


@each_kernel
def test_arguments_are_the_written_registers_in_order(registers):
    arguments = kernel_arguments(registers)
    assert [a.index for a in arguments] == list(range(len(arguments)))
    written = [register for register in registers if register.access is Access.RW]
    assert [a.register for a in arguments] == written
    assert all(a.register.offset >= 0x10 for a in arguments)


@each_kernel
def test_every_address_is_a_pointer_and_nothing_else_is(registers):
    for argument in kernel_arguments(registers):
        assert argument.is_pointer == argument.register.name.endswith("_address")
        assert argument.register.width_bits == 64 or not argument.is_pointer


@pytest.mark.parametrize("build", CONFIGS.values(), ids=lambda build: build.full_name)
def test_pointers_use_every_port_that_the_build_has(build):
    ports = {argument.port for argument in kernel_arguments(build.registers)} - {CONTROL_PORT}
    assert ports == {f"m_axi_gmem{index}" for index in range(build.ports)}


def test_state_is_read_and_written_through_one_port():
    ports = {argument.register.name: argument.port for argument in kernel_arguments(ALL_REGISTERS["update"])}
    assert ports["m_address"] == ports["m_out_address"] == ports["m_scale_out_address"] == "m_axi_gmem2"
    assert ports["v_address"] == ports["v_scale_address"] == "m_axi_gmem3"
    assert ports["p_address"] == ports["rest_address"] == ports["rest_out_address"] == "m_axi_gmem1"
    assert ports["g_address"] == ports["copy_out_address"] == "m_axi_gmem0" and ports["params"] == CONTROL_PORT
