"""A step's work on an extent in device memory."""

from collections.abc import Callable
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

    def __call__(self, transfer: Transfer, slot: Slot, done: Callable[[], None]) -> None:
        """Start the updates of a slot; `done` is called when the last has ended, by this or a later call of transfer's.

        Raises DeviceError, WaitTimeoutError, NonFiniteError, also for commands of the call before.
        """
        assert slot.extent is not None, "only a slot that was read is updated"
        extent = slot.extent
        runs = list(self._plan.within(extent))
        for run in runs:
            self._start(transfer, slot, run, done if run is runs[-1] else None)
        if self._compressor is not None:
            left_out = self._compressor.after(extent.start, extent.params, [run.start for run in runs])
            for name, values in left_out.items():
                slot.host[name][: values.nbytes] = values.view(np.uint8)
        if not runs:
            done()

    def _start(self, transfer: Transfer, slot: Slot, run: ParameterRun, done: Callable[[], None] | None) -> None:
        span, params = self._timeline.span, run.stop - run.start
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
            self._update_matrices(transfer, slot, run, run.rule, done)
            return
        if self._compressor is not None:
            with span("compress", params=params):
                stream = self._compressor.compress(run.start, gradients, self._step)
        self._update(transfer, slot, run, done, stream, bf16=bf16)

    def _update(
        self,
        transfer: Transfer,
        slot: Slot,
        run: ParameterRun,
        done: Callable[[], None] | None,
        stream: NDArray[np.uint8] | None = None,
        *,
        bf16: bool = False,
    ) -> None:
        """Update a run and stage it: low-precision tensors from what changes, where this saves bytes or is kept."""
        flat = self._flat
        worth = transfer.writes_delta and (self._compare or transfer.device.HAS_LINK)
        delta = worth and bool(run.copy) and flat.is_plain(run.start, run.stop)

        def receive(new: NDArray[np.uint8]) -> None:
            with self._timeline.span("stage", params=run.stop - run.start):
                if delta:
                    flat.stage_changes(run.start, run.stop, new, compare=self._compare)
                else:
                    flat.stage(run.start, run.stop, new, run.copy, compare=self._compare)
            if done is not None:
                done()

        transfer.submit(slot, run, receive, stream, bf16=bf16, delta=delta)

    def _update_matrices(
        self, transfer: Transfer, slot: Slot, run: ParameterRun, rule: MuonStep, done: Callable[[], None] | None
    ) -> None:
        """The momentum of all, from the gradients that were gathered; then each matrix's part of its update."""
        span, flat = self._timeline.span, self._flat
        if rule.momentum:
            transfer.submit(slot, replace(run, rule=rule.moment, copy=CopyFormat.NONE), None)
        tensors = flat.tensors_in(run.start, run.stop)
        for tensor in tensors:
            entry = flat.entries[tensor]
            part = replace(run, start=max(run.start, entry.start), stop=min(run.stop, entry.stop))
            params = part.stop - part.start
            given = transfer.gradients(params)
            with span("orthogonalize", params=params):
                self._orthogonalizer.put(tensor, rule, run.scalar, part.start - entry.start, given)
            part = replace(part, rule=rule.application(entry.shape))
            self._update(transfer, slot, part, done if tensor == tensors[-1] else None)
