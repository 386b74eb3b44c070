"""A step's work on an extent in device memory."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.kernel.commands import CopyFormat
from nearflash.support.timeline import Timeline
from nearflash.training.gradients.compression import Compressor
from nearflash.training.step.fingerprint import GradientFingerprints
from nearflash.training.step.muon import MuonStep, Orthogonalizer
from nearflash.training.step.parameters import FlatParameters, Gradients
from nearflash.training.step.plan import ParameterRun, StepPlan
from nearflash.training.step.transfer import Slot, Transfer

__all__ = ["ExtentUpdate"]


class ExtentUpdate:
    """Gathers gradients (and compresses them), updates, and stages the new parameters, where runs cover an extent.

    From any thread, for different extents at once. step: the one that is made, from 1.
    """

    def __init__(
        self,
        flat: FlatParameters,
        plan: StepPlan,
        timeline: Timeline,
        compressor: Compressor | None,
        step: int,
        gathered: GradientFingerprints | None,
        orthogonalizer: Orthogonalizer,
        given: Gradients,
        *,
        compare: bool = False,
    ) -> None:
        """gathered: takes the fingerprints of the gradients that are gathered. orthogonalizer: of this step.

        given: gradients, by tensor, in the place of what the tensors have. compare: find what changes, too.
        """
        self._flat, self._plan, self._timeline = flat, plan, timeline
        self._compressor, self._step, self._gathered = compressor, step, gathered
        self._orthogonalizer, self._given, self._compare = orthogonalizer, given, compare

    def __call__(self, transfer: Transfer, slot: Slot) -> None:
        """Raises DeviceError, WaitTimeoutError, NonFiniteError."""
        assert slot.extent is not None, "only a slot that was read is updated"
        span, extent = self._timeline.span, slot.extent
        runs = list(self._plan.within(extent))
        for run in runs:
            params = run.stop - run.start
            may = self._compressor is None and transfer.takes_bf16 and not isinstance(run.rule, MuonStep)
            bf16 = may and self._flat.has_bf16_gradients(run.start, run.stop, self._given)
            gradients, stream = transfer.gradients(params), None
            with span("gather gradients", params=params):
                if bf16:
                    words = transfer.bf16_gradients(params)
                    self._flat.put_bf16_gradients(run.start, run.stop, words, self._gathered, self._given)
                else:
                    self._flat.put_gradients(run.start, run.stop, run.scalar, gradients, self._gathered, self._given)
            if isinstance(run.rule, MuonStep):
                self._update_matrices(transfer, slot, run, run.rule)
                continue
            if self._compressor is not None:
                with span("compress", params=params):
                    stream = self._compressor.compress(run.start, gradients, self._step)
            self._update(transfer, slot, run, stream, bf16=bf16)
        if self._compressor is not None:
            left_out = self._compressor.after(extent.start, extent.params, [run.start for run in runs])
            for name, values in left_out.items():
                slot.host[name][: values.nbytes] = values.view(np.uint8)

    def _update(
        self,
        transfer: Transfer,
        slot: Slot,
        run: ParameterRun,
        stream: NDArray[np.uint8] | None = None,
        *,
        bf16: bool = False,
    ) -> None:
        """Update a run and stage it: low-precision tensors from what changes, where this saves bytes or is kept."""
        span, flat, params = self._timeline.span, self._flat, run.stop - run.start
        worth = transfer.writes_delta and (self._compare or transfer.device.HAS_LINK)
        delta = worth and bool(run.copy) and flat.is_plain(run.start, run.stop)
        with span("update", params=params):
            new = transfer.update(slot, run, stream, bf16=bf16, delta=delta)
        with span("stage", params=params):
            if delta:
                flat.stage_changes(run.start, run.stop, new, compare=self._compare)
            else:
                flat.stage(run.start, run.stop, new, run.copy, compare=self._compare)

    def _update_matrices(self, transfer: Transfer, slot: Slot, run: ParameterRun, rule: MuonStep) -> None:
        """The momentum of all, from the gradients that were gathered; then each matrix's part of its update."""
        span, flat = self._timeline.span, self._flat
        if rule.momentum:
            with span("update", params=run.stop - run.start):
                transfer.apply(slot, replace(run, rule=rule.moment, copy=CopyFormat.NONE))
        for tensor in flat.tensors_in(run.start, run.stop):
            entry = flat.entries[tensor]
            part = replace(run, start=max(run.start, entry.start), stop=min(run.stop, entry.stop))
            params = part.stop - part.start
            with span("orthogonalize", params=params):
                given = transfer.gradients(params)
                self._orthogonalizer.put(tensor, rule, run.scalar, part.start - entry.start, given)
            self._update(transfer, slot, replace(part, rule=rule.application(entry.shape)))
