"""A mixed fleet: nearflash's optimizer step on drives that compute and on plain ones, whose state the host updates.

Parameters are striped so that all end together: each drive takes a share by its rate. A drive that computes moves its
state inside; a plain one's state crosses the link that all share, both ways at once. Reads, update and writes overlap.
"""

from collections.abc import Mapping

from nearflash.abi.errors import PlanError
from nearflash.explore.links import Link
from nearflash.explore.outcome import Outcome
from nearflash.explore.processors import Cpu
from nearflash.explore.shapes import find_trained
from nearflash.explore.systems.smart_infinity import OptimizerBytes, SmartSsd
from nearflash.explore.tables import read_part

__all__ = ["fleet_step", "update_rates"]

_MASTER_BYTES = 4


def fleet_step(model: str, near: int, plain: int, optimizer: str = "adam") -> Outcome:
    """The update of one step on `near` drives that compute and `plain` ones that do not. Raises PlanError for none."""
    if min(near, plain) < 0 or not near + plain:
        raise PlanError(f"near and plain must be 0 or more and 1 drive in all, not {near} and {plain}")
    drive, parameters = read_part(SmartSsd, "smartssd"), find_trained(model).parameters_count
    moved = _MASTER_BYTES + read_part(OptimizerBytes, optimizer).state_bytes_per_param
    rates = update_rates(near, plain, optimizer)
    total = sum(rates.values())
    stripes = {name: rate / total for name, rate in rates.items()}
    held = {name: share * moved * parameters for name, share in stripes.items() if share}
    return Outcome(
        system=f"{near} drives that compute, {plain} plain",
        model=model,
        phases={"update": parameters / total},
        memory_bytes=held,
        capacity_bytes=_capacity(drive, near, plain),
        parts={"host": 1, "smartssd": near, "ssd-4tb": plain},
        traffic_bytes={"shared link": 2 * stripes["plain drives"] * moved * parameters},
        assumptions=(
            "parameters are striped by the drives' rates",
            "reads, update and writes overlap",
            "gradients are in memory beside what updates",
        ),
    )


def update_rates(near: int, plain: int, optimizer: str = "adam") -> dict[str, float]:
    """Parameters a second that one host's drives update: those that compute, and plain ones by the host."""
    drive, shared = read_part(SmartSsd, "smartssd"), read_part(Link, "pcie-expansion")
    state = read_part(OptimizerBytes, optimizer)
    moved = _MASTER_BYTES + state.state_bytes_per_param
    near_rate = min(drive.read_bytes_per_s / moved, drive.write_bytes_per_s / moved)
    return {
        "drives that compute": near * min(near_rate, drive.dram_bytes_per_s / (2 * moved + _MASTER_BYTES)),
        "plain drives": min(plain * near_rate, shared.bytes_per_s / moved, _host_rate(state)),
    }


def _host_rate(state: OptimizerBytes) -> float:
    return 1 / read_part(Cpu, "xeon-6342").seconds(state.cpu_bytes_per_param)


def _capacity(drive: SmartSsd, near: int, plain: int) -> Mapping[str, float]:
    return {"drives that compute": near * drive.flash_bytes, "plain drives": plain * drive.flash_bytes}
