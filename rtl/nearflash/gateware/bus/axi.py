"""AXI4 and AXI4-Lite wiring signatures with the standard's flat member names.

A port `m_axi_gmem0 = Out(Axi4Signature(512))` becomes `m_axi_gmem0__awaddr`, ... in Verilog, which the AXI models find
under the prefix `m_axi_gmem0_`. All signatures are seen from the master.

Limits: one transaction identifier (1 bit, always 0), so responses come in order; incrementing bursts of full beats.
Source: AMBA AXI and ACE protocol specification, IHI 0022, chapters A2 (signals), A3 (handshake, bursts), B1 (Lite).
"""

from amaranth import Module
from amaranth.lib import enum, wiring
from amaranth.lib.wiring import In, Out

__all__ = [
    "ADDRESS_BITS",
    "CACHE_NORMAL",
    "PAGE_BYTES",
    "Axi4ReadSignature",
    "Axi4Signature",
    "Axi4WriteSignature",
    "AxiBurst",
    "AxiLiteSignature",
    "AxiResponse",
    "connect_channels",
]

#: Width of every memory address.
ADDRESS_BITS = 64
#: No burst crosses a multiple of this.
PAGE_BYTES = 4096

_ID_BITS = 1
_DATA_WIDTHS_BITS = (32, 64, 128, 256, 512)


class AxiResponse(enum.Enum, shape=2):
    """Response codes of the B and R channels (clause A3.4.4)."""

    OKAY = 0
    EXOKAY = 1
    SLVERR = 2
    DECERR = 3


class AxiBurst(enum.Enum, shape=2):
    """Burst types of AxBURST (clause A3.4.1)."""

    FIXED = 0
    INCR = 1
    WRAP = 2


#: AxCACHE of all masters here: normal, non-cacheable, bufferable memory (clause A4.4), as AMD's interconnect expects.
CACHE_NORMAL = 0b0011


def _check_data_width(data_width_bits: int) -> None:
    if data_width_bits not in _DATA_WIDTHS_BITS:
        raise ValueError(f"data_width_bits must be one of {_DATA_WIDTHS_BITS}, not {data_width_bits!r}")


def _address_channel(prefix: str) -> dict[str, wiring.Member]:
    fields = {"id": _ID_BITS, "addr": ADDRESS_BITS, "len": 8, "size": 3, "burst": 2, "cache": 4, "prot": 3, "valid": 1}
    return {f"{prefix}{name}": Out(width) for name, width in fields.items()} | {f"{prefix}ready": In(1)}


def _read_channels(data_width_bits: int) -> dict[str, wiring.Member]:
    data = {"rid": _ID_BITS, "rdata": data_width_bits, "rresp": 2, "rlast": 1, "rvalid": 1}
    return _address_channel("ar") | {name: In(width) for name, width in data.items()} | {"rready": Out(1)}


def _write_channels(data_width_bits: int) -> dict[str, wiring.Member]:
    data = {"wdata": data_width_bits, "wstrb": data_width_bits // 8, "wlast": 1, "wvalid": 1}
    response = {"bid": _ID_BITS, "bresp": 2, "bvalid": 1}
    return (
        _address_channel("aw")
        | {name: Out(width) for name, width in data.items()}
        | {"wready": In(1)}
        | {name: In(width) for name, width in response.items()}
        | {"bready": Out(1)}
    )


class Axi4ReadSignature(wiring.Signature):
    """The AR and R channels of an AXI4 master with `data_width_bits` of 32, 64, 128, 256 or 512."""

    def __init__(self, data_width_bits: int) -> None:
        _check_data_width(data_width_bits)
        super().__init__(_read_channels(data_width_bits))


class Axi4WriteSignature(wiring.Signature):
    """The AW, W and B channels of an AXI4 master with `data_width_bits` of 32, 64, 128, 256 or 512."""

    def __init__(self, data_width_bits: int) -> None:
        _check_data_width(data_width_bits)
        super().__init__(_write_channels(data_width_bits))


class Axi4Signature(wiring.Signature):
    """All five channels of an AXI4 master with `data_width_bits` of 32, 64, 128, 256 or 512."""

    def __init__(self, data_width_bits: int) -> None:
        _check_data_width(data_width_bits)
        super().__init__(_write_channels(data_width_bits) | _read_channels(data_width_bits))


class AxiLiteSignature(wiring.Signature):
    """An AXI4-Lite master: 32-bit data, `address_bits` of byte address."""

    def __init__(self, address_bits: int) -> None:
        if not 2 < address_bits <= ADDRESS_BITS:
            raise ValueError(f"address_bits must be 3 to {ADDRESS_BITS}, not {address_bits!r}")
        super().__init__(
            {
                "awaddr": Out(address_bits),
                "awprot": Out(3),
                "awvalid": Out(1),
                "awready": In(1),
                "wdata": Out(32),
                "wstrb": Out(4),
                "wvalid": Out(1),
                "wready": In(1),
                "bresp": In(2),
                "bvalid": In(1),
                "bready": Out(1),
                "araddr": Out(address_bits),
                "arprot": Out(3),
                "arvalid": Out(1),
                "arready": In(1),
                "rdata": In(32),
                "rresp": In(2),
                "rvalid": In(1),
                "rready": Out(1),
            }
        )


def connect_channels(m: Module, part: wiring.PureInterface, port: wiring.PureInterface) -> None:
    """Connect a reader's or a writer's `bus` to its channels of a kernel's AXI4 port.

    Parameters
    ----------
    m : module that gets the statements.
    part : inner `bus`, with the read or the write channels.
    port : the kernel's own `Out(Axi4Signature)` port with the same data width.
    """
    for name, member in part.signature.members.items():
        inner, outer = getattr(part, name), getattr(port, name)
        m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
