"""kernel.xml: ports and arguments of a kernel for XRT (UG1393, "Creating the kernel description XML file").

Offsets, sizes and order are those of the register table (nearflash.abi.kernel_arguments); an argument's port is where
its data go, whatever register block holds its value.
"""

from xml.etree import ElementTree as xml

from nearflash.abi.kernel_arguments import CONTROL_PORT, KernelArgument, kernel_arguments
from nearflash.boards.vendor.kernel import KernelDesign

__all__ = ["CONTROL_PROTOCOL", "VENDOR_NAME", "kernel_xml", "vlnv"]

CONTROL_PROTOCOL = "ap_ctrl_chain"
VENDOR_NAME = "nearflash"
_SCALARS = {32: "uint", 64: "ulong"}
"""C types of scalars, by bits."""


def vlnv(kernel: str) -> str:
    """Vendor, library, name and version of a kernel's IP."""
    return f"{VENDOR_NAME}:kernel:{kernel}:1.0"


def kernel_xml(design: KernelDesign) -> str:
    """Text of kernel.xml."""
    build = design.build
    root = xml.Element("root", versionMajor="1", versionMinor="6")
    kernel = xml.SubElement(
        root, "kernel", name=build.kernel, language="ip_c", vlnv=vlnv(build.kernel), attributes="",
        preferredWorkGroupSizeMultiple="0", workGroupSize="1", interrupt="true", hwControlProtocol=CONTROL_PROTOCOL,
    )  # fmt: skip
    ports = xml.SubElement(kernel, "ports")
    for bus in design.buses:
        is_control = bus == CONTROL_PORT
        xml.SubElement(
            ports, "port", name=bus, mode="slave" if is_control else "master", portType="addressable", base="0x0",
            range=f"{build.registers.size_bytes:#x}" if is_control else "0xFFFFFFFFFFFFFFFF",
            dataWidth="32" if is_control else str(build.port_bits),
        )  # fmt: skip
    arguments = xml.SubElement(kernel, "args")
    for argument in kernel_arguments(build.registers):
        xml.SubElement(arguments, "arg", _attributes(argument))
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def _attributes(argument: KernelArgument) -> dict[str, str]:
    size = f"{argument.register.width_bits // 8:#x}"
    return {
        "name": argument.register.name, "addressQualifier": str(int(argument.is_pointer)), "id": str(argument.index),
        "port": argument.port, "size": size, "offset": f"{argument.register.offset:#05x}", "hostOffset": "0x0",
        "hostSize": size, "type": "void*" if argument.is_pointer else _SCALARS[argument.register.width_bits],
    }  # fmt: skip
