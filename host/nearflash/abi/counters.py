"""Hardware counters: names, what they count, and the rates that follow from them.

Counters are 64 bits, cleared when a command starts and latched when it ends: the host reads a stable copy.
"""

from collections.abc import Mapping

__all__ = ["UPDATE_COUNTERS", "gigabytes_per_second"]

UPDATE_COUNTERS = {
    "cycles": "clock cycles from start to the last write response",
    "params_done": "parameters written",
    "nonfinite_gradients": "gradients that were NaN or infinite",
    "copy_overflows": "finite parameters whose fp16 or bf16 copy became infinite",
    "read_beats": "data beats read, all ports",
    "write_beats": "data beats written, all ports",
    "wait_g_cycles": "cycles in which the lanes waited for gradients",
    "wait_p_cycles": "cycles in which the lanes waited for parameters",
    "wait_m_cycles": "cycles in which the lanes waited for first moments",
    "wait_v_cycles": "cycles in which the lanes waited for second moments",
    "wait_write_cycles": "cycles in which the lanes waited for the writers",
}


def gigabytes_per_second(counters: Mapping[str, int], *, port_bytes: int, clock_hz: float) -> float:
    """Traffic of the memory ports in 10^9 bytes/s at a clock, reads and writes together."""
    beats = counters["read_beats"] + counters["write_beats"]
    return beats * port_bytes * clock_hz / max(counters["cycles"], 1) / 1e9
