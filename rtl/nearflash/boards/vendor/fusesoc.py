"""A kernel's core description for FuseSoC: CAPI2, with the files of nearflash.boards.vendor.sources.

    fusesoc --cores-root DIR run --target lint nearflash:kernel:update

Source: FuseSoC's user guide, CAPI2 reference; Edalize's flows `lint` and `generic`.
"""

import json

from nearflash.abi.kernel.config import KernelConfig
from nearflash.support.release import release

__all__ = ["LINT_WAIVERS", "core_text"]

LINT_WAIVERS = ("CASEOVERLAP", "CMPCONST", "SYMRSVDWORD", "UNSIGNED", "WIDTHEXPAND", "WIDTHTRUNC")
"""Warnings of Verilator that the target `lint` lets through; nearflash.verify.lint states why each is no fault."""


def core_text(build: KernelConfig, verilog: str) -> str:
    """Text of `<kernel>.core` for this name of the Verilog file beside it."""
    core = {
        "name": f"nearflash:kernel:{build.kernel}:{release()}",
        "description": f"nearflash {build.full_name}, configuration digest {build.digest64:016x}",
        "filesets": {"rtl": {"files": [verilog], "file_type": "verilogSource"}},
        "targets": {
            "default": {"filesets": ["rtl"], "toplevel": build.kernel},
            "lint": {
                "flow": "lint",
                "flow_options": {
                    "tool": "verilator",
                    "verilator_options": [f"-Wno-{rule}" for rule in LINT_WAIVERS],
                },
                "filesets": ["rtl"],
                "toplevel": build.kernel,
            },
        },
    }
    return "CAPI=2:\n" + json.dumps(core, indent=2) + "\n"  # YAML reads JSON
