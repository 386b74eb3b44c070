"""Bench `attend`, bit errors: heads read from NAND at raw bit error rates, against the model.

A mismatch is a head with an output that differs from the model's, or without output and without a fault that reports
it. At the last rate most codewords have more errors than the code corrects: those heads have to end with
UNCORRECTABLE.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.faults import Fault
from nearflash.abi.kernel.config import attend_config
from nearflash.device.drivers.attend import attend
from nearflash.model.attention.random_vectors import MODES, random_mode_vector
from nearflash.model.attention.vectors import differences
from nearflash.sim.verilator.device import VerilatorDevice
from nearflash.sim.verilator.heads import place_heads

__all__ = ["BIT_ERROR_RATES", "error_rows"]

CONFIG = "attend-tiny"
BIT_ERROR_RATES = (1e-6, 1e-4, 1e-3, 1e-2)


def error_rows(tokens: int = 512, seed: int = 1) -> Iterator[dict[str, Any]]:
    """One row a rate: two heads of each mode, d = 128."""
    rng = np.random.default_rng(seed)
    vectors = [random_mode_vector(rng, mode, 128, group, tokens, PageTag(index, group, index))
             for index, mode in enumerate(MODES) for group in (1, 2)]  # fmt: skip
    with VerilatorDevice(attend_config(CONFIG), memory_bytes=1 << 26) as device, place_heads(device, vectors) as heads:
        for rate in BIT_ERROR_RATES:
            for index, channel in enumerate(device.kernel.channels):
                channel.configure(replace(channel.model, bit_error_rate=rate, seed=index))
            done = attend(device, heads, contexts=2)
            reported = [bool(one.completion.faults & Fault.UNCORRECTABLE) for one in done.heads]
            wrong = [
                one.out is not None if lost else bool(differences(vector, one.completion, one.out, repeated=True))
                for vector, one, lost in zip(vectors, done.heads, reported, strict=True)
            ]  # fmt: skip
            counters = [batch.counters for batch in done.batches]
            yield {
                "config": CONFIG, "bit_error_rate": rate, "heads": len(vectors), "mismatches": sum(wrong),
                "heads_uncorrectable": sum(reported),
                **{f"codewords_{name}": sum(c[f"codewords_{name}"] for c in counters)
                   for name in ("received", "corrected", "uncorrectable")},
                "of": "raw bits read", "unit": "heads that differ from the model without a fault that reports it",
            }  # fmt: skip
