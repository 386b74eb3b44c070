"""Timing modes of ONFI's asynchronous (SDR) data interface: what a PHY keeps and a model of NAND checks.

Mode 0 is the slowest, which every part has after power on. Source: ONFI 4.2, "SDR Timing Modes".
"""

from dataclasses import dataclass

__all__ = ["SDR_MODES", "SdrTiming"]


@dataclass(frozen=True)
class SdrTiming:
    """Nanoseconds at the pins; the least that is allowed, unless it says at most. Each is ONFI's t of that name.

    wp, wh, wc: WE# low, high, from fall to fall; rp, reh, rc: the same of RE#. cls, als, ds, cs: CLE, ALE, DQ, CE#
    before WE# rises; clh, alh, dh, ch: behind it. rea, cea: from RE#, CE# falling to data, at most; rhoh, rloh: data
    behind RE# rising, and behind the next RE# falling (0: none). clr, ar, rr: from CLE, ALE falling, from ready to RE#
    falling. rhw: from RE# rising to WE# falling. whr, ccs: from WE# rising of a status command, of E0h, to RE# falling.
    adl: from WE# rising of the last address to that of the first data. wb: from WE# rising to busy, at most.
    """

    wp_ns: int
    wh_ns: int
    wc_ns: int
    cls_ns: int
    clh_ns: int
    als_ns: int
    alh_ns: int
    ds_ns: int
    dh_ns: int
    cs_ns: int
    ch_ns: int
    rp_ns: int
    reh_ns: int
    rc_ns: int
    rea_ns: int
    rhoh_ns: int
    rloh_ns: int
    cea_ns: int
    clr_ns: int
    ar_ns: int
    rr_ns: int
    rhw_ns: int
    whr_ns: int
    adl_ns: int
    ccs_ns: int
    wb_ns: int


_BY_MODE = {
    "wp_ns": (50, 25, 17, 15, 12, 10), "wh_ns": (30, 15, 15, 10, 10, 7), "wc_ns": (100, 45, 35, 30, 25, 20),
    "cls_ns": (50, 25, 15, 10, 10, 10), "clh_ns": (20, 10, 10, 5, 5, 5), "als_ns": (50, 25, 15, 10, 10, 10),
    "alh_ns": (20, 10, 10, 5, 5, 5), "ds_ns": (40, 20, 15, 10, 10, 7), "dh_ns": (20, 10, 5, 5, 5, 5),
    "cs_ns": (70, 35, 25, 25, 20, 15), "ch_ns": (20, 10, 10, 5, 5, 5), "rp_ns": (50, 25, 17, 15, 12, 10),
    "reh_ns": (30, 15, 15, 10, 10, 7), "rc_ns": (100, 50, 35, 30, 25, 20), "rea_ns": (40, 30, 25, 20, 20, 16),
    "rhoh_ns": (0, 15, 15, 15, 15, 15), "rloh_ns": (0, 0, 0, 0, 5, 5), "cea_ns": (100, 45, 30, 25, 25, 25),
    "clr_ns": (20, 10, 10, 10, 10, 10), "ar_ns": (25, 10, 10, 10, 10, 10), "rr_ns": (40, 20, 20, 20, 20, 20),
    "rhw_ns": (200, 100, 100, 100, 100, 100), "whr_ns": (120, 80, 80, 80, 80, 80), "adl_ns": (400,) * 6,
    "ccs_ns": (500,) * 6, "wb_ns": (200, 100, 100, 100, 100, 100),
}  # fmt: skip
SDR_MODES = {mode: SdrTiming(**{name: times[mode] for name, times in _BY_MODE.items()}) for mode in range(6)}
"""By timing mode; tCCS is the default of parts that state none."""
