"""Amaranth layouts of the registers in `nearflash.abi`."""

from amaranth.hdl import ShapeLike, unsigned
from amaranth.lib import data

from nearflash.abi.fields import Register

__all__ = ["register_layout"]


def register_layout(register: Register) -> ShapeLike:
    """Shape of a register: a layout with its fields by name, or a plain integer when it has none."""
    if not register.fields:
        return unsigned(register.width_bits)
    fields = {field.name: data.Field(unsigned(field.width), field.lsb) for field in register.fields}
    return data.FlexibleLayout(register.width_bits, fields)
