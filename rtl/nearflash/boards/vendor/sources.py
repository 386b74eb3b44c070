"""A kernel for somebody else's design or testbench: its Verilog and what describes it, in one folder.

<kernel>.v         one file, with the ports of nearflash.boards.vendor.kernel
<kernel>.json      configuration, digest, ports, and registers by name
nearflash_abi.h    registers, fields and status codes for C and C++
<kernel>.core      FuseSoC's description
"""

from pathlib import Path

from nearflash.abi.emit import c, json
from nearflash.abi.kernel.config import config
from nearflash.boards.vendor.fusesoc import core_text
from nearflash.boards.vendor.kernel import convert_kernel
from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["write_sources"]


def write_sources(full_name: str, folder: Path) -> list[Path]:
    """Write the files of a build; returns their paths. Its identity registers read a git revision of 0.

    Raises ConfigError for an unknown name, BitstreamError where Yosys refuses the design.
    """
    build = config(full_name)
    design = convert_kernel(build)
    ports = {pin.name: ("in" if pin.is_input else "out", pin.width) for pin in design.pins}
    verilog = folder / f"{design.top}.v"
    texts = {
        f"{design.top}.json": json.kernel_document(build, ports),
        "nearflash_abi.h": c.header(),
        f"{design.top}.core": core_text(build, verilog.name),
    }
    folder.mkdir(parents=True, exist_ok=True)
    design.write_verilog(verilog)
    for name, text in texts.items():
        write_durably(folder / name, text, mode=PUBLIC_MODE)
    return [verilog, *(folder / name for name in texts)]
