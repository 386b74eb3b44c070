"""Vitis HLS synthesis reports (`<top>_csynth.xml`): clock, loops, resources.

Layout: `profile` with UserAssignments (TopModelName, Part, TargetClockPeriod in ns), PerformanceEstimates
(SummaryOfTimingAnalysis/EstimatedClockPeriod in ns, SummaryOfLoopLatency with one element a loop: PipelineII,
PipelineDepth) and AreaEstimates/Resources. A report of a whole design (csynth.xml) holds one such block a module, in
ModuleInformation/Module with its Name. Tested on samples of our own only: no Vitis was at hand.
"""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from nearflash.abi.errors import FormatError
from nearflash.support.files import read_bytes

__all__ = ["Loop", "SynthesisReport", "read_report"]


@dataclass(frozen=True)
class Loop:
    """A pipelined loop."""

    module: str
    name: str
    ii: int
    depth_cycles: int
    """0 where the report has none."""


@dataclass(frozen=True)
class SynthesisReport:
    """Figures of a kernel in a synthesis report."""

    top: str
    part: str
    target_ns: float
    estimated_ns: float
    """Estimated clock period; NaN where the report has none."""
    loops: tuple[Loop, ...]
    resources: dict[str, int]

    @property
    def clock_hz(self) -> float:
        """Clock that the estimate allows, Hz: no more than the target's."""
        period = self.target_ns if math.isnan(self.estimated_ns) else max(self.target_ns, self.estimated_ns)
        return 1e9 / period

    @property
    def slowest_ii(self) -> int:
        """The largest II over all loops: the kernel's, as its stages run at once. 1 where no loop is pipelined."""
        return max((loop.ii for loop in self.loops), default=1)


def read_report(path: Path) -> SynthesisReport:
    """The report in the file. Raises FormatError for another file."""
    try:
        root = ElementTree.fromstring(read_bytes(path))
    except (ElementTree.ParseError, OSError, ValueError, LookupError) as error:
        raise FormatError(f"{path} must be a Vitis HLS report (<top>_csynth.xml), not unreadable: {error}") from error
    top = root.findtext(".//TopModelName")
    target = root.findtext(".//TargetClockPeriod")
    if top is None or target is None:
        raise FormatError(f"{path} must be a Vitis HLS report with TopModelName and TargetClockPeriod, not {root.tag}")
    modules = root.findall(".//Module") or [root]
    loops = [loop for module in modules for loop in _loops(module, module.findtext("Name") or top)]
    periods = [float(x.text) for x in root.iter("EstimatedClockPeriod") if x.text]
    resources = root.findall("./AreaEstimates/Resources/*")
    return SynthesisReport(
        top=top,
        part=root.findtext(".//Part") or "",
        target_ns=float(target),
        estimated_ns=max(periods, default=math.nan),
        loops=tuple(loops),
        resources={element.tag: int(element.text or 0) for element in resources if (element.text or "").isdigit()},
    )


def _loops(module: ElementTree.Element, name: str) -> list[Loop]:
    loops = []
    for summary in module.iter("SummaryOfLoopLatency"):
        for element in summary.iter():
            ii = element.findtext("PipelineII") or ""
            if ii.isdigit():  # "undef" where it is unknown
                depth = element.findtext("PipelineDepth") or ""
                label = element.findtext("Name") or element.get("name") or element.tag
                loops.append(Loop(name, label, int(ii), int(depth) if depth.isdigit() else 0))
    return loops
