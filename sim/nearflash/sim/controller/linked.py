"""A component with NAND links, Verilated, with a model of NAND behind each: bursts of its other streams as ever."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike, NDArray

from nearflash.sim.nand.channel import NandChannel, NandModel, link_names, nand_header
from nearflash.sim.verilator.streams import Devices, StreamUnit
from nearflash.sim.verilog import Design

__all__ = ["NandLinkedUnit"]


class NandLinkedUnit(StreamUnit):
    """`component` as a library; `channels` are those behind its links, with what they store, kept from run to run."""

    def __init__(self, component: Any, name: str, model: NandModel) -> None:
        links: list[str] = []

        def devices(design: Design) -> Devices:
            links.extend(link_names(design.ports))
            streams = tuple(f"{link}__{part}" for link in links for part in ("cycles", "read", "write"))
            return Devices(nand_header(design) + "using Devices = NandDevices;\n", streams)

        super().__init__(component, name, devices)
        self.channels = [NandChannel(self._library, self.device(index), model) for index in range(len(links))]

    def run(
        self, inputs: Mapping[str, ArrayLike], outputs: Mapping[str, int], **options: Any
    ) -> dict[str, NDArray[Any]]:
        """As StreamUnit.run; a broken rule of ONFI counts before anything else. Raises NandViolation too."""
        try:
            return super().run(inputs, outputs, **options)
        finally:
            for channel in self.channels:
                channel.check()
