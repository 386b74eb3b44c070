"""The contract as JSON, for tools that read neither Python nor C."""

import json
from collections.abc import Mapping
from dataclasses import asdict

from nearflash.abi import ABI_VERSION
from nearflash.abi.formats import FORMATS
from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import CONFIGS, KernelConfig
from nearflash.abi.registers import ALL_REGISTERS, MAGIC

__all__ = ["document", "kernel_document"]


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


def kernel_document(build: KernelConfig, ports: Mapping[str, tuple[str, int]]) -> str:
    """Text of `<kernel>.json`: one build, the ports of its Verilog (`in` or `out`, bits), its registers by name."""
    registers = {register.name: asdict(register) for register in build.registers}
    return (
        json.dumps(
            {
                "abi_version": ABI_VERSION,
                "magic": MAGIC,
                "kernel": build.kernel,
                "config": {**asdict(build), "digest": build.digest},  # type: ignore[call-overload]
                "ports": {name: {"direction": way, "bits": bits} for name, (way, bits) in ports.items()},
                "registers": registers,
                "status": {s.name: s.value for s in Status},
            },
            indent=1,
        )
        + "\n"
    )
