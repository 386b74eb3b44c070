"""The kernel's register map follows the XRT and identity rules of the house."""

from nearflash.abi.registers import MAGIC, UPDATE


def test_the_control_words_stand_where_xrt_expects_them() -> None:
    offsets = {
        name: UPDATE[name].offset for name in ("control", "interrupt_enable", "interrupt_mask", "interrupt_status")
    }
    assert list(offsets.values()) == [0x00, 0x04, 0x08, 0x0C]
    assert {f.name: f.lsb for f in UPDATE["control"].fields} == {
        "ap_start": 0, "ap_done": 1, "ap_idle": 2, "ap_ready": 3, "ap_continue": 4, "auto_restart": 7,
    }  # fmt: skip
    assert min(r.offset for r in UPDATE if r.access == "rw") >= 0x10


def test_every_block_begins_with_type_version_size() -> None:
    for prefix, kind in (("identity", b"IDEN"), ("update", b"UPDT"), ("counters", b"CNTR")):
        start = UPDATE[f"{prefix}_type"]
        assert start.reset.to_bytes(4, "little") == kind
        assert UPDATE[f"{prefix}_version"].offset == start.offset + 4
        assert UPDATE[f"{prefix}_size"].offset == start.offset + 8
        inside = [r for r in UPDATE if start.offset <= r.offset < start.offset + UPDATE[f"{prefix}_size"].reset]
        assert start in inside
        assert all(r.offset + r.width_bits // 8 <= start.offset + UPDATE[f"{prefix}_size"].reset for r in inside)
    assert UPDATE["magic"].reset == MAGIC


def test_wide_registers_are_not_split_over_8_byte_words_of_the_counters() -> None:
    assert all(r.offset % 8 == 0 for r in UPDATE if r.width_bits == 64)
