"""What a step does to an extent in device memory."""

from nearflash.training.parameters import FlatParameters
from nearflash.training.plan import Plan
from nearflash.training.timeline import Timeline
from nearflash.training.transfer import Slot, Transfer

__all__ = ["UpdateExtent"]


class UpdateExtent:
    """Gathers gradients, updates, and stages the new parameters, where the plan's runs cover an extent.

    From any thread, for different extents at once.
    """

    def __init__(self, flat: FlatParameters, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self._flat, self._timeline = flat, timeline

    def __call__(self, transfer: Transfer, slot: Slot) -> None:
        """Raises DeviceError, WaitTimeoutError, NonFiniteError."""
        assert slot.extent is not None, "only a slot that was read is updated"
        span = self._timeline.span
        for run in self.plan.within(slot.extent):
            params = run.stop - run.start
            with span("gather gradients", params=params):
                self._flat.put_gradients(run.start, run.stop, run.scalar, transfer.gradients(params))
            with span("update", params=params):
                new = transfer.update(slot, run)
            with span("stage", params=params):
                self._flat.stage(run.start, run.stop, new, run.copy)
