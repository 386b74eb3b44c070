"""Where each register of each kernel lies: the contract as hosts and bitstreams in the field know it.

A line that changes here changes the ABI: devices of the old layout and hosts of the new one no longer match.
"""

import pytest

from nearflash.abi import ABI_VERSION
from nearflash.abi.counters import KERNEL_COUNTERS
from nearflash.abi.fields import Access
from nearflash.abi.registers import FACTOR_BITS, MAGIC, REGISTER_MAPS, UPDATE, fourcc

#: (offset, bits), the same in every kernel.
COMMON = {
    "control": (0x000, 32),
    "interrupt_enable": (0x004, 32),
    "interrupt_mask": (0x008, 32),
    "interrupt_status": (0x00C, 32),
    "identity_type": (0x010, 32),
    "identity_version": (0x014, 32),
    "identity_size": (0x018, 32),
    "magic": (0x01C, 32),
    "abi_version": (0x020, 32),
    "git_revision": (0x024, 32),
    "config_digest": (0x028, 64),
}
OWN = {
    "update": {
        "update_type": (0x040, 32),
        "update_version": (0x044, 32),
        "update_size": (0x048, 32),
        "program": (0x04C, 32),
        "params": (0x050, 32),
        "gradient_bytes": (0x054, 32),
        "g_address": (0x058, 64),
        "p_address": (0x060, 64),
        "m_address": (0x068, 64),
        "v_address": (0x070, 64),
        "p_out_address": (0x078, 64),
        "m_out_address": (0x080, 64),
        "v_out_address": (0x088, 64),
        "copy_out_address": (0x090, 64),
        "decay": (0x098, 32),
        "m_decay": (0x09C, 32),
        "m_gain": (0x0A0, 32),
        "v_decay": (0x0A4, 32),
        "v_gain": (0x0A8, 32),
        "eps": (0x0AC, 32),
        "pre_scale": (0x0B0, 32),
        "post_scale": (0x0B4, 32),
        "denominator_factor": (0x0B8, 64),
        "status": (0x0C0, 32),
        "fault_address": (0x0C8, 64),
        "m_scale_address": (0x0D0, 64),
        "v_scale_address": (0x0D8, 64),
        "m_scale_out_address": (0x0E0, 64),
        "v_scale_out_address": (0x0E8, 64),
        "step": (0x0F0, 32),
        "first_param": (0x0F8, 64),
    },
    "attend": {
        "attend_type": (0x040, 32),
        "attend_version": (0x044, 32),
        "attend_size": (0x048, 32),
        "count": (0x04C, 32),
        "descriptors_address": (0x050, 64),
        "completions_address": (0x058, 64),
        "contexts": (0x060, 32),
        "watchdog": (0x064, 32),
        "status": (0x068, 32),
        "waiting": (0x06C, 32),
        "fault_address": (0x070, 64),
        "command": (0x078, 32),
    },
    "expand": {
        "expand_type": (0x040, 32),
        "expand_version": (0x044, 32),
        "expand_size": (0x048, 32),
        "format": (0x04C, 32),
        "in_address": (0x050, 64),
        "out_address": (0x058, 64),
        "in_bytes": (0x060, 32),
        "rows": (0x064, 32),
        "columns": (0x068, 32),
        "status": (0x06C, 32),
        "fault_address": (0x070, 64),
    },
}
#: First bit and width of each field of each register that has fields.
FIELDS = {
    "update": {
        "program": {
            "decay_mode": (0, 2),
            "decay_fused": (2, 1),
            "m_difference": (3, 1),
            "m_fused": (4, 1),
            "v_square_first": (5, 1),
            "v_fused": (6, 1),
            "denominator_fused": (7, 1),
            "p_fused": (8, 1),
            "copy_format": (9, 2),
            "topk": (11, 1),
            "direction": (12, 2),
            "m_absent": (14, 1),
            "v_absent": (15, 1),
            "state_format": (16, 2),
        },
        "denominator_factor": {"significand": (0, 51), "exponent": (51, 10)},
    },
    "attend": {
        "waiting": {
            "memory": (0, 1),
            "prepare": (1, 1),
            "scan": (2, 1),
            "select": (3, 1),
            "gather": (4, 1),
            "finish": (5, 1),
            "pages": (6, 1),
            "channels": (16, 16),
        },
    },
    "expand": {"format": {"element": (0, 8), "coding": (8, 8), "output": (16, 8)}},
}
CONTROL = set(COMMON) & {"control", "interrupt_enable", "interrupt_mask", "interrupt_status"}
each_kernel = pytest.mark.parametrize("kernel", REGISTER_MAPS)


@each_kernel
def test_offsets_and_widths(kernel):
    """Before the counters, whose order is that of their table."""
    registers = {register.name: (register.offset, register.width_bits) for register in REGISTER_MAPS[kernel]}
    counters = {"counters_type": (0x100, 32), "counters_version": (0x104, 32), "counters_size": (0x108, 32)}
    counters |= {name: (0x110 + 8 * place, 64) for place, name in enumerate(KERNEL_COUNTERS[kernel])}
    assert registers == COMMON | OWN[kernel] | counters


@each_kernel
def test_fields(kernel):
    found = {
        register.name: {field.name: (field.lsb, field.width) for field in register.fields}
        for register in REGISTER_MAPS[kernel]
        if register.fields and register.name not in CONTROL
    }
    assert found == FIELDS[kernel]


@each_kernel
def test_no_two_fields_of_a_register_share_a_bit(kernel):
    for register in REGISTER_MAPS[kernel]:
        union = 0
        for field in register.fields:
            assert not union & field.mask, f"{register.name}.{field.name}"
            union |= field.mask
        assert union < 1 << register.width_bits


@each_kernel
def test_what_the_host_may_write(kernel):
    """Addresses and numbers of a command, and the control words; identity, status and counters are the kernel's."""
    registers = REGISTER_MAPS[kernel]
    assert {register.name for register in registers if register.access is Access.CONTROL} == CONTROL
    read_only = {"status", "fault_address", "waiting", *COMMON} - CONTROL
    for register in registers:
        if register.name in CONTROL:
            continue
        is_block = register.name.endswith(("_type", "_size")) or register.name in {
            f"{prefix}_version" for prefix in ("identity", "abi", "counters", kernel)
        }
        expected = register.name in read_only or is_block or register.name in KERNEL_COUNTERS[kernel]
        assert (register.access is Access.RO) == expected, register.name


@each_kernel
def test_constants_that_identify_a_kernel(kernel):
    registers = REGISTER_MAPS[kernel]
    kinds = {"update": "UPDT", "attend": "ATTN", "expand": "EXPD"}
    assert registers["identity_type"].reset == fourcc("IDEN")
    assert registers[f"{kernel}_type"].reset == fourcc(kinds[kernel])
    assert registers["counters_type"].reset == fourcc("CNTR")
    assert registers["counters_size"].reset == 0x10 + 8 * len(KERNEL_COUNTERS[kernel])
    assert registers["magic"].reset == MAGIC == 0x4853464E
    assert registers["abi_version"].reset == ABI_VERSION
    assert registers.size_bytes == 0x1000
    assert "identity_type" in registers and "nothing" not in registers


@each_kernel
def test_every_register_says_what_it_is(kernel):
    for register in REGISTER_MAPS[kernel]:
        assert register.doc and all(field.doc for field in register.fields), register.name


def test_fourcc_is_readable_in_a_dump():
    assert fourcc("UPDT").to_bytes(4, "little") == b"UPDT"
    with pytest.raises(UnicodeEncodeError):
        fourcc("größ")


def test_the_factor_fills_its_register():
    fields = UPDATE["denominator_factor"].fields
    assert FACTOR_BITS == fields[0].width == 51
    assert UPDATE["denominator_factor"].pack({"significand": (1 << 51) - 1, "exponent": 0x3FF}) == (1 << 61) - 1
