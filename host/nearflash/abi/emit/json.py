"""The contract as JSON, for tools that read neither Python nor C."""

import json
from dataclasses import asdict

from nearflash.abi import ABI_VERSION
from nearflash.abi.formats import FORMATS
from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.registers import ALL_REGISTERS, MAGIC

__all__ = ["document"]


def document() -> str:
    """Text of docs/contracts/abi.json."""
    return (
        json.dumps(
            {
                "abi_version": ABI_VERSION,
                "magic": MAGIC,
                "kernels": {name: [asdict(r) for r in registers] for name, registers in ALL_REGISTERS.items()},
                "status": {s.name: s.value for s in Status},
                "formats": {name: asdict(f) for name, f in FORMATS.items()},
                "configs": {name: {**asdict(c), "digest": c.digest} for name, c in CONFIGS.items()},
            },
            indent=1,
        )
        + "\n"
    )
