"""Timing modes of ONFI's asynchronous (SDR) data interface: what a PHY keeps and a model of NAND checks.

Source: ONFI 4.2, "SDR Timing Modes": the slowest, which every part has after power on, and the fastest.
"""

from dataclasses import dataclass

__all__ = ["SDR_MODES", "SdrTiming"]


@dataclass(frozen=True)
class SdrTiming:
    """Nanoseconds at the pins; the least that is allowed, unless it says at most."""

    wp_ns: int
    """WE# low."""
    wh_ns: int
    """WE# high."""
    wc_ns: int
    """From WE# falling to WE# falling."""
    cls_ns: int
    """CLE before WE# rises; clh_ns: after it."""
    clh_ns: int
    als_ns: int
    """ALE before WE# rises; alh_ns: after it."""
    alh_ns: int
    ds_ns: int
    """DQ before WE# rises; dh_ns: after it."""
    dh_ns: int
    cs_ns: int
    """CE# before WE# rises; ch_ns: after it."""
    ch_ns: int
    rp_ns: int
    """RE# low."""
    reh_ns: int
    """RE# high."""
    rc_ns: int
    """From RE# falling to RE# falling."""
    rea_ns: int
    """From RE# falling to data, at most."""
    rhoh_ns: int
    """Data behind RE# rising."""
    rloh_ns: int
    """Data behind the next RE# falling; 0: none."""
    cea_ns: int
    """From CE# falling to data, at most."""
    clr_ns: int
    """From CLE falling to RE# falling."""
    ar_ns: int
    """From ALE falling to RE# falling."""
    rr_ns: int
    """From ready to RE# falling."""
    rhw_ns: int
    """From RE# rising to WE# falling."""
    whr_ns: int
    """From WE# rising of a status command to RE# falling."""
    adl_ns: int
    """From WE# rising of the last address to WE# rising of the first data."""
    ccs_ns: int
    """From WE# rising of E0h to RE# falling."""
    wb_ns: int
    """From WE# rising to busy, at most."""


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
