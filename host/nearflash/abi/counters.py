"""Hardware counters: names, what they count, and the rates that follow from them.

Counters are 64 bits, cleared when a command starts and latched when it ends: the host reads a stable copy.
"""

__all__ = ["ATTEND_COUNTERS", "EXPAND_COUNTERS", "KERNEL_COUNTERS", "UPDATE_COUNTERS"]

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

ATTEND_COUNTERS = {
    "cycles": "clock cycles from start to the last completion",
    "heads_done": "heads completed, faulty ones too",
    "heads_faulty": "heads completed with a fault",
    "index_requests": "index pages asked for",
    "token_requests": "KV page groups asked for, unindexed suffix and gather",
    "codewords_asked": "codewords asked for, 512 data bytes each",
    "codewords_received": "codewords that came from a page source",
    "codewords_corrected": "codewords with bit errors that were corrected",
    "codewords_uncorrectable": "codewords with more bit errors than the code corrects",
    "codewords_foreign": "whole codewords of another page_tag or page",
    "beats_used": "64-bit beats that reached the lanes, all channels",
    "lane_cycles": "cycles in which a channel's lanes worked, all channels",
    "wait_data_cycles": "cycles in which a channel's lanes waited for pages, all channels",
    "wait_score_cycles": "cycles in which a channel waited for the score path, all channels",
    "prepare_cycles": "cycles in which a head was being prepared",
    "scan_cycles": "cycles in which some head was in its scan",
    "select_cycles": "cycles in which the selection worked",
    "gather_cycles": "cycles in which some head was in its gather",
    "finish_cycles": "cycles in which a head was being finished",
    "read_beats": "data beats read from memory",
    "write_beats": "data beats written to memory",
}

EXPAND_COUNTERS = {
    "cycles": "clock cycles from start to the last write response",
    "rows_done": "rows written",
    "elements_done": "elements written, without the padding of rows",
    "values_done": "values that these rows have",
    "read_beats": "data beats read",
    "write_beats": "data beats written",
    "wait_read_cycles": "cycles in which the parser waited for the matrix",
    "wait_write_cycles": "cycles in which dense rows waited for the writer",
}

KERNEL_COUNTERS = {"update": UPDATE_COUNTERS, "attend": ATTEND_COUNTERS, "expand": EXPAND_COUNTERS}
