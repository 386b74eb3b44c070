"""Faults of one head: a set of bits, so that it does not depend on the order in which they were met."""

from enum import IntFlag

__all__ = ["FAULT_ADVICE", "REFERENCE_FAULTS", "Fault"]


class Fault(IntFlag):
    """Error of one head; its output is then not written. Other heads are not touched."""

    DESCRIPTOR = 1 << 0
    """A field of the descriptor is outside its range (S = 0, r > d, an address that is not aligned, …)."""
    MEMORY = 1 << 1
    """The memory answered with SLVERR or DECERR."""
    ENTRY = 1 << 2
    """A page table entry names a channel or source that this build does not have."""
    UNCORRECTABLE = 1 << 3
    """A codeword had more bit errors than the code corrects."""
    MISDIRECTED = 1 << 4
    """A codeword is whole but belongs to another page_tag or page."""
    NONFINITE = 1 << 5
    """q, K or V holds an infinity or a NaN."""
    SCORE_RANGE = 1 << 6
    """A score or logit lies outside the range of its format."""
    REFERENCE_HIGH = 1 << 7
    """A logit passes the reference by more than the headroom: repeat with the returned maximum as reference."""
    REFERENCE_LOW = 1 << 8
    """All logits lie far below the reference: repeat with the returned maximum as reference."""
    WATCHDOG = 1 << 9
    """The head made no progress for as long as the watchdog allows."""


REFERENCE_FAULTS = Fault.REFERENCE_HIGH | Fault.REFERENCE_LOW
"""A head with no other fault is repeated with the returned maximum as reference."""

FAULT_ADVICE: dict[Fault, str] = {
    Fault.DESCRIPTOR: "check the descriptor's fields against docs/contracts/attention.md",
    Fault.MEMORY: "check that every address lies in the memory that the kernel reaches",
    Fault.ENTRY: "check the page tables: channel below the number of channels, a page source that the build has",
    Fault.UNCORRECTABLE: "the page is lost: recompute these tokens or drop the sequence, and retire the block",
    Fault.MISDIRECTED: "the page table points at another page: rebuild it from the page headers",
    Fault.NONFINITE: "the model produced an infinity or a NaN: check its activations",
    Fault.SCORE_RANGE: "scores pass 2^19: use the fp16 index or dense attention for this head",
    Fault.REFERENCE_HIGH: "repeat the head with the returned maximum as reference",
    Fault.REFERENCE_LOW: "repeat the head with the returned maximum as reference",
    Fault.WATCHDOG: "a page never came: check channel, lun and row, then reset the device",
}
