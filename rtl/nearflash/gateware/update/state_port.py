"""State port: what the reader and the writer of an array in two parts share between command and memory port.

    elements: gearbox ─ mover ─┬─ arbiter ─ bus
    scales:   gearbox ─ mover ─┘

Scales go in bursts of one beat. A split master (`master_port`) has two such halves in the place of these.
"""

from typing import Any, Literal, TypeVar

from amaranth import Module, Mux, Value
from amaranth.lib import data, wiring

from nearflash.abi.formats import FP32
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers.state import BLOCK_PARAMS, StateFormat
from nearflash.gateware.bus.arbiter import ReadArbiter
from nearflash.gateware.bus.axi import ADDRESS_BITS
from nearflash.gateware.bus.read import BurstReader
from nearflash.gateware.bus.write import BurstWriter
from nearflash.gateware.bus.write_arbiter import WriteArbiter
from nearflash.gateware.stream.gearbox import pieces
from nearflash.gateware.stream.sized_gearbox import SizedNarrow, SizedWiden
from nearflash.gateware.update.block_scale import SCALE_BITS
from nearflash.gateware.update.state_form import FORM_BITS, per_format

__all__ = ["StateCommand", "pair_movers", "state_gearboxes", "state_movers"]

# fp32 elements halved once are as wide as bf16, twice as mx8: the register field's value.
_HALVINGS = len(StateFormat) - 1
_SCALE_BURSTS = 4  # in flight
_KINDS: dict[str, tuple[Any, Any]] = {"r": (BurstReader, ReadArbiter), "w": (BurstWriter, WriteArbiter)}
_Gearbox = TypeVar("_Gearbox", SizedNarrow, SizedWiden)


class StateCommand(data.Struct):
    """Move m or v of `params` parameters, from or to byte addresses of the elements and of the scales.

    `form` is StateFormat.code. Elements begin at a multiple of what a group takes.
    """

    address: ADDRESS_BITS
    scale_address: ADDRESS_BITS
    params: 32
    form: FORM_BITS


def state_movers(m: Module, port: Any, command: Any, channel: Literal["r", "w"]) -> tuple[Any, Any]:
    """Readers or writers of the elements and of the scales of the StateCommand `command`: see `pair_movers`."""
    port_bytes = port.config.port_bytes
    elements = (command.address, _element_beats(command, port_bytes))
    scales = (command.scale_address, _scale_beats(command, port_bytes))
    return pair_movers(m, port, {"elements": elements, "scales": scales}, channel, (_SCALE_BURSTS, port_bytes))


def pair_movers(
    m: Module, port: Any, ranges: dict[str, tuple[Any, Any]], channel: Literal["r", "w"], second: tuple[int, int]
) -> tuple[Any, Any]:
    """Two readers or writers, by the names in `ranges`, behind an arbiter at the bus of `port`.

    Drives the payloads of their commands from `ranges` (byte address, beats), and what `port` says of both: `idle`, a
    cycle late where it rises, `error` and `events`. second: bursts that the second one has in flight, and their bytes.
    """
    config = port.config
    mover, arbiter_of = _KINDS[channel]
    m.submodules.arbiter = arbiter = arbiter_of(
        2, config.port_bits, max_outstanding=config.outstanding_bursts + second[0]
    )
    limits = ((config.outstanding_bursts, config.burst_bytes), second)
    for name, (bursts, burst_bytes) in zip(ranges, limits, strict=True):
        m.submodules[name] = mover(config.port_bits, max_outstanding=bursts, max_burst_bytes=burst_bytes)
    first, other = (getattr(m.submodules, name) for name in ranges)
    wiring.connect(m, arbiter.bus, wiring.flipped(port.bus))
    for index, one in enumerate((first, other)):
        wiring.connect(m, one.bus, arbiter.port[index])
        m.d.comb += one.clear.eq(port.clear)
    for one, (address, beats) in zip((first, other), ranges.values(), strict=True):
        m.d.comb += [one.i_command.payload.address.eq(address), one.i_command.payload.beats.eq(beats)]
    m.d.comb += [
        # Both may have failed: of two errors the first one's is shown.
        port.error.eq(Mux(first.error.seen, first.error.as_value(), other.error.as_value())),
        port.events.eq(first.events),
        port.events.beat.eq(getattr(port.bus, f"{channel}valid") & getattr(port.bus, f"{channel}ready")),
    ]
    taken = first.i_command.valid & first.i_command.ready
    # Movers are busy a cycle after they take a command: `idle` must not rise in between.
    m.d.sync += port.idle.eq(first.idle & other.idle & ~taken)
    return first, other


def state_gearboxes(m: Module, config: UpdateConfig, command: Any, kind: type[_Gearbox]) -> tuple[_Gearbox, _Gearbox]:
    """Gearboxes between beats and groups of elements, and between beats and scales, of the StateCommand `command`."""
    group_bits = FP32.bits * config.lanes
    m.submodules.groups = groups = kind(group_bits, config.port_bits // group_bits, halvings=_HALVINGS)
    m.submodules.bytes = bytes_ = kind(SCALE_BITS, config.port_bytes)
    m.d.comb += [
        groups.halved.eq(command.form),
        groups.first.eq(command.address[config.lanes.bit_length() - 1 :]),
        bytes_.first.eq(command.scale_address),
    ]
    return groups, bytes_


def _element_beats(command: Any, port_bytes: int) -> Value:
    offset_bits = (port_bytes - 1).bit_length()
    widths = [command.params << _HALVINGS - halved for halved in range(_HALVINGS + 1)]
    # Beats that the range touches: its first element may lie within one.
    return pieces(per_format(command.form, *widths) + command.address[:offset_bits], port_bytes)


def _scale_beats(command: Any, port_bytes: int) -> Value:
    offset_bits = (port_bytes - 1).bit_length()
    return pieces(pieces(command.params, BLOCK_PARAMS) + command.scale_address[:offset_bits], port_bytes)
