"""A NAND part at its pins, by ONFI's asynchronous (SDR) interface: what comes on DQ when, and every wait checked.

`step` once a clock with the pins as they are from that clock edge on; it gives DQ as it will be at the next edge. Where
data are not promised, DQ are the complement of the byte that comes or was there. One LUN for each chip enable.
Limits: the commands that nearflash's controller sends; no cache reads, no features.
Source: ONFI 4.2, "Command Definition", "SDR Timing Parameters".
"""

import math
from dataclasses import dataclass, field

from nearflash.abi.onfi import SdrTiming
from nearflash.sim.nand.channel import NandViolation

__all__ = ["Pins", "SdrNand"]

_NEVER = -math.inf
_READY, _BUSY, _FAIL = 0xE0, 0x80, 0x01
_ADDRESSES = {0x00: 5, 0x80: 5, 0x60: 3, 0x05: 2, 0x06: 5, 0x78: 3}


@dataclass(frozen=True)
class Pins:
    """Levels from a clock edge on; dq None: nobody on the controller's side drives it."""

    cle: int
    ale: int
    we_n: int
    re_n: int
    ce_n: int
    """A bit for each LUN."""
    dq: int | None


_IDLE = Pins(0, 0, 1, 1, -1, None)


@dataclass
class _Lun:
    pages: dict[int, bytes] = field(default_factory=dict)
    command: int = -1
    address: list[int] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)
    register: bytes = b""
    column: int = 0
    status: bool = False
    failed: bool = False
    ready_at: float = 0.0
    started: bool = False


class SdrNand:
    """LUNs behind one bus.

    timing: of the mode that the part is in. array_ns: how long a LUN is busy. A rule that is broken is a NandViolation
    with its name, from `step`.
    """

    def __init__(self, timing: SdrTiming, clock_hz: int, *, luns: int = 1, page_bytes: int = 64,
                 pages_per_block: int = 4, array_ns: int = 2000) -> None:  # fmt: skip
        self.luns = [_Lun() for _ in range(luns)]
        self.bad_blocks: set[tuple[int, int]] = set()
        """LUN, block: programs and erases fail."""
        self._timing, self._clock_ns, self._page_bytes = timing, 1e9 / clock_hz, page_bytes
        self._block, self._array_ns = pages_per_block, array_ns
        self._now, self._pins = 0.0, _IDLE
        self._at: dict[str, float] = dict.fromkeys(
            ("we fall", "we rise", "re fall", "re rise", "cle", "ale", "dq", "ce", "status", "column", "address"),
            _NEVER,
        )
        self._byte, self._former = 0xFF, 0xFF
        self._data_from = self._former_until = _NEVER

    def step(self, pins: Pins) -> int:
        """DQ at the next clock edge. Raises NandViolation."""
        before, self._pins = self._pins, pins
        for name in ("cle", "ale", "dq"):
            if getattr(pins, name) != getattr(before, name):
                self._hold(name)
        if pins.ce_n != before.ce_n:
            self._need("tCH", "we rise", self._timing.ch_ns)
            self._at["ce"] = self._now
        self._edges(before, pins)
        self._now += self._clock_ns
        return self._dq()

    # Edges

    def _edges(self, before: Pins, pins: Pins) -> None:
        if before.we_n and not pins.we_n:
            self._need("tWH", "we rise", self._timing.wh_ns)
            self._need("tWC", "we fall", self._timing.wc_ns)
            self._need("tRHW", "re rise", self._timing.rhw_ns)
            self._at["we fall"] = self._now
        if not before.we_n and pins.we_n:
            self._write(pins)
        if before.re_n and not pins.re_n:
            self._fall(pins)
        if not before.re_n and pins.re_n:
            self._need("tRP", "re fall", self._timing.rp_ns)
            self._at["re rise"] = self._now

    def _hold(self, name: str) -> None:
        """A pin changes: it was held behind WE# rising."""
        parameter = {"cle": "clh_ns", "ale": "alh_ns", "dq": "dh_ns"}[name]
        self._need(_symbol(parameter), "we rise", getattr(self._timing, parameter))
        self._at[name] = self._now

    def _write(self, pins: Pins) -> None:
        timing = self._timing
        self._need("tWP", "we fall", timing.wp_ns)
        for name, parameter in (("cle", "cls_ns"), ("ale", "als_ns"), ("dq", "ds_ns"), ("ce", "cs_ns")):
            self._need(_symbol(parameter), name, getattr(timing, parameter))
        if pins.dq is None:
            self._fail("DQ must be driven where WE# rises")
        if pins.cle and pins.ale:
            self._fail("CLE and ALE must not be high together")
        self._at["we rise"] = self._now
        assert pins.dq is not None, "checked"
        for number, lun in self._find_selected(pins):
            if pins.cle:
                self._command(number, lun, pins.dq)
            elif pins.ale:
                self._address(lun, pins.dq)
            else:
                self._data(lun, pins.dq)

    def _fall(self, pins: Pins) -> None:
        timing = self._timing
        for symbol, since, time_ns in (
            ("tREH", "re rise", timing.reh_ns), ("tRC", "re fall", timing.rc_ns), ("tCLR", "cle", timing.clr_ns),
            ("tAR", "ale", timing.ar_ns), ("tWHR", "status", timing.whr_ns), ("tCCS", "column", timing.ccs_ns),
        ):  # fmt: skip
            self._need(symbol, since, time_ns)
        if pins.dq is not None:
            self._fail("DQ must not be driven where RE# falls")
        for _, lun in self._find_selected(pins):
            if not lun.status and self._now < lun.ready_at + timing.rr_ns:
                self._fail("tRR must pass after ready")
            self._former, self._byte = self._byte, self._next_byte(lun)
        self._former_until = self._now + timing.rloh_ns if self._data_from < self._now else _NEVER
        self._at["re fall"] = self._now
        self._data_from = max(self._now + timing.rea_ns, self._at["ce"] + timing.cea_ns)

    def _dq(self) -> int:
        """DQ at the edge that comes."""
        if self._now <= self._former_until:
            return self._former
        until = math.inf if self._at["re rise"] < self._at["re fall"] else self._at["re rise"] + self._timing.rhoh_ns
        return self._byte if self._data_from <= self._now <= until else self._byte ^ 0xFF

    def _next_byte(self, lun: _Lun) -> int:
        if lun.status:
            return (_READY if self._now >= lun.ready_at else _BUSY) | (_FAIL if lun.failed else 0)
        if lun.column >= len(lun.register):
            self._fail("data out must lie within a page that was read")
        lun.column += 1
        return lun.register[lun.column - 1]

    def _find_selected(self, pins: Pins) -> list[tuple[int, _Lun]]:
        found = [(number, lun) for number, lun in enumerate(self.luns) if not pins.ce_n >> number & 1]
        if len(found) != 1:
            self._fail(f"CE# of one LUN must be low, not of {len(found)}")
        return found

    # Commands

    def _command(self, number: int, lun: _Lun, byte: int) -> None:
        ready = self._now >= lun.ready_at
        if not lun.started and byte != 0xFF:
            self._fail(f"FFh must be the first command, not {byte:02X}h")
        if byte in (0x70, 0x78, 0xFF):
            pass
        elif not ready:
            self._fail(f"{byte:02X}h must wait until the LUN is ready")
        lun.status = byte == 0x70
        if lun.status:
            self._at["status"] = self._now
        elif byte == 0xFF:
            lun.started, lun.command, lun.failed = True, -1, False
            self._make_busy(lun)
        elif byte in _ADDRESSES:
            lun.command, lun.address, lun.data = byte, [], bytearray()
        else:
            self._confirm(number, lun, byte)

    def _confirm(self, number: int, lun: _Lun, byte: int) -> None:
        first = {0x30: (0x00,), 0xE0: (0x05, 0x06), 0x10: (0x80,), 0xD0: (0x60,)}.get(byte, ())
        if lun.command not in first or len(lun.address) != _ADDRESSES[lun.command]:
            self._fail(f"{byte:02X}h must follow its command and addresses")
        row = int.from_bytes(lun.address[-3:], "little")
        block = range(row // self._block * self._block, (row // self._block + 1) * self._block)
        lun.column = int.from_bytes(lun.address[:2], "little")
        if byte == 0xE0:
            self._at["column"] = self._now
            return
        self._make_busy(lun)
        bad = (number, row // self._block) in self.bad_blocks
        if byte == 0x30:
            lun.register = lun.pages.get(row, b"\xff" * self._page_bytes)
        elif byte == 0x10:
            lun.failed = bad or any(page in lun.pages for page in block if page >= row)
            if not lun.failed:
                lun.pages[row] = (b"\xff" * lun.column + bytes(lun.data)).ljust(self._page_bytes, b"\xff")
        else:
            lun.failed = bad
            lun.pages = lun.pages if bad else {page: data for page, data in lun.pages.items() if page not in block}

    def _address(self, lun: _Lun, byte: int) -> None:
        lun.address.append(byte)
        if lun.command not in _ADDRESSES or len(lun.address) > _ADDRESSES[lun.command]:
            self._fail(f"an address must belong to a command, not {byte:02X}h")
        self._at["address"] = self._now

    def _data(self, lun: _Lun, byte: int) -> None:
        if lun.command != 0x80 or len(lun.address) != _ADDRESSES[0x80]:
            self._fail("data in must follow 80h and its addresses")
        if not lun.data:
            self._need("tADL", "address", self._timing.adl_ns)
        lun.data.append(byte)

    def _make_busy(self, lun: _Lun) -> None:
        lun.ready_at = self._now + self._array_ns

    # Rules

    def _need(self, symbol: str, since: str, time_ns: float) -> None:
        passed = self._now - self._at[since]
        if passed < time_ns - 1e-6:
            self._fail(f"{symbol} must be at least {time_ns} ns, not {passed:g}")

    def _fail(self, text: str) -> None:
        raise NandViolation(f"at {self._now:g} ns: {text}")


def _symbol(parameter: str) -> str:
    return f"t{parameter.removesuffix('_ns').upper()}"
