"""Is a mutant that no vector told from the original the same circuit after all?

Two proofs, both from the initial state on: register by register (Yosys' `equiv_induct`); and, where a register differs
but perhaps no output does, of the outputs only, by temporal induction over a few cycles. What neither proves within
its bounds counts as not equivalent.
"""

from pathlib import Path

from nearflash.sim.mutation.yosys import yosys

__all__ = ["is_equivalent"]

_STEPS = 12
_SAT_TIMEOUT_S = 5
_PROCESS_TIMEOUT_S = 20


def is_equivalent(original: str, command: str, folder: Path) -> bool:
    """Whether `original` (flat RTLIL of one module) and its mutant by Yosys' `command` are proven equal."""
    (folder / "flat.il").write_text(original)
    pair = ["read_rtlil flat.il", "memory_map", "write_rtlil mapped.il"]
    # Mutations name cells as they are before memories become registers.
    changed = ["design -reset", "read_rtlil flat.il", command, "rename top gate", "memory_map", "write_rtlil gate.il"]
    both = ["design -reset", "read_rtlil mapped.il", "rename top gold", "read_rtlil gate.il"]
    registers = ["equiv_make gold gate equal", "hierarchy -top equal", "opt_clean", "equiv_simple -seq 2"]
    registers += [f"equiv_induct -seq {_STEPS}", "equiv_status -assert"]
    outputs = ["miter -equiv -flatten -make_outputs gold gate miter", "hierarchy -top miter", "opt -full"]
    outputs += [f"sat -verify -tempinduct -prove trigger 0 -set-init-zero -maxsteps {_STEPS} -timeout {_SAT_TIMEOUT_S}"]
    return any(
        yosys(folder, [*pair, *changed, *both, *proof], f"{name}.log", _PROCESS_TIMEOUT_S)
        for name, proof in (("registers", registers), ("outputs", outputs))
    )
