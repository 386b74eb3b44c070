"""Master port: what the reader and the writer of p share, in builds with split masters, between command and port.

p, or the weights: gearbox ─ mover ─┬─ arbiter ─ bus
rests:             gearbox ─ mover ─┘
"""

from typing import Any, Literal, TypeVar

from amaranth import Module
from amaranth.lib import data

from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.gateware.bus.axi import ADDRESS_BITS
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.stream.sized_gearbox import SizedNarrow, SizedWiden
from nearflash.gateware.update.state_port import pair_movers

__all__ = ["HALF_BITS", "MasterCommand", "master_gearboxes", "master_movers"]

HALF_BITS = FP32.bits // 2
_Gearbox = TypeVar("_Gearbox", SizedNarrow, SizedWiden)


class MasterCommand(data.Struct):
    """Move p of `params` parameters, from or to byte addresses: p's, or with `split` the weights' and the rests'.

    Halves begin at a multiple of what a group takes.
    """

    address: ADDRESS_BITS
    rest_address: ADDRESS_BITS
    params: 32
    split: 1


def master_movers(m: Module, port: Any, command: Any, channel: Literal["r", "w"]) -> tuple[Any, Any]:
    """Readers or writers of p or the weights, and of the rests, of the MasterCommand `command`: see `pair_movers`."""
    config = port.config
    offset_bits = (config.port_bytes - 1).bit_length()

    def beats(address: Any, size_bytes: Any) -> Any:
        # Beats that the range touches: its first half may lie within one.
        return pieces(size_bytes + address[:offset_bits], config.port_bytes)

    halves = command.params << 1
    words = (command.address, beats(command.address, halves << ~command.split))
    rests = (command.rest_address, beats(command.rest_address, halves))
    # Half as many bytes as p's are as long in flight in half as many bursts.
    second = (max(2, config.outstanding_bursts // 2), config.burst_bytes)
    return pair_movers(m, port, {"words": words, "rests": rests}, channel, second)


def master_gearboxes(m: Module, config: UpdateConfig, command: Any, kind: type[_Gearbox]) -> tuple[_Gearbox, _Gearbox]:
    """Gearboxes between beats and groups of p or of weights, and between beats and groups of rests."""
    half_bits = HALF_BITS * config.lanes
    ratio, place_bits = config.port_bits // half_bits, (half_bits // 8).bit_length() - 1
    m.submodules.wide = wide = kind(2 * half_bits, ratio // 2, halvings=1)
    m.submodules.narrow = narrow = kind(half_bits, ratio)
    m.d.comb += [
        wide.halved.eq(command.split),
        wide.first.eq(command.address[place_bits:]),
        narrow.first.eq(command.rest_address[place_bits:]),
    ]
    return wide, narrow
