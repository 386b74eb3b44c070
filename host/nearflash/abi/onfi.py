"""Timing modes of ONFI's asynchronous (SDR) data interface: what a PHY keeps and a model of NAND checks.

Source: ONFI 4.2, "SDR Timing Modes": the slowest, which every part has after power on, and the fastest.
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


SDR_MODES = {
    0: SdrTiming(
        wp_ns=50, wh_ns=30, wc_ns=100, cls_ns=50, clh_ns=20, als_ns=50, alh_ns=20, ds_ns=40, dh_ns=20, cs_ns=70,
        ch_ns=20, rp_ns=50, reh_ns=30, rc_ns=100, rea_ns=40, rhoh_ns=0, rloh_ns=0, cea_ns=100, clr_ns=20, ar_ns=25,
        rr_ns=40, rhw_ns=200, whr_ns=120, adl_ns=400, ccs_ns=500, wb_ns=200,
    ),
    5: SdrTiming(
        wp_ns=10, wh_ns=7, wc_ns=20, cls_ns=10, clh_ns=5, als_ns=10, alh_ns=5, ds_ns=7, dh_ns=5, cs_ns=15,
        ch_ns=5, rp_ns=10, reh_ns=7, rc_ns=20, rea_ns=16, rhoh_ns=15, rloh_ns=5, cea_ns=25, clr_ns=10, ar_ns=10,
        rr_ns=20, rhw_ns=100, whr_ns=80, adl_ns=400, ccs_ns=500, wb_ns=100,
    ),
}  # fmt: skip
"""By timing mode; tCCS is the default of parts that state none."""
