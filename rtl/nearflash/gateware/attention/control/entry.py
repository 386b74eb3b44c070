"""Page table entries: the layout of the 64-bit word, and whether this build can read such a page."""

from amaranth.hdl import Const, Mux, Value
from amaranth.lib import data

from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.control.interfaces import ADDRESS_BITS

__all__ = ["PageEntryLayout", "entry_is_legal"]

_ROW_BITS, _UNIT_BITS = 32, 8


class PageEntryLayout(data.Struct):
    """An entry: byte address in memory, or row (32 bits) and LUN (8 bits) on NAND (nearflash.abi.attention.pages)."""

    address: ADDRESS_BITS
    channel: 8
    reserved: 7
    memory: 1


def entry_is_legal(entry: data.View, config: AttendConfig) -> Value:
    """Whether the entry names a channel of the build, and a LUN that it has or an aligned address."""
    in_memory = entry.address[:3] == 0
    on_nand = entry.address[_ROW_BITS:] < config.luns if config.luns else Const(0)
    return (entry.channel < config.channels) & Mux(entry.memory, in_memory, on_nand)
