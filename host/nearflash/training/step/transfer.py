"""Extents between flash, one device's memory, and host.

    flash --p, m, v--> slot: updated in place in device memory --p', m', v'--> the spare slot on flash
    host  --gradients--> device --parameters, their copy, or what this changes--> host

Two commands are in flight: while the device works on one, the host gathers the gradients of the next and takes the
parameters of the one before.

Stored arrays go by direct I/O into the device's p2p window; where a device has none they go to the buffer's host copy,
and the detour is counted on the host link.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.delta import DeltaHeader, delta_error
from nearflash.abi.errors import NearflashError, NonFiniteError, StateError
from nearflash.abi.formats import BF16, FP32
from nearflash.abi.kernel.commands import Completion, CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.kernel.config import KernelConfig, UpdateConfig
from nearflash.abi.optimizers import MasterFormat
from nearflash.abi.topk import HEADER_BYTES, StreamFault
from nearflash.device import Buffer, Device
from nearflash.device.checked import CheckedDevice
from nearflash.storage import Extent, StateArray, StateStore, aligned_buffer
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.storage.state.master import join_master
from nearflash.support.timeline import Timeline
from nearflash.training.step.plan import ParameterRun
from nearflash.training.step.traffic import Traffic

__all__ = ["HOST_ARRAYS", "PutWeights", "Slot", "Transfer", "build_of"]

HOST_ARRAYS = ("residual", "residual_scale")
"""Stored arrays that stay in host memory: what compression left out
(nearflash.training.gradients.compression.residual)."""

IN_FLIGHT = 2
"""Commands that have buffers of their own for gradients and copies."""

Receive = Callable[[NDArray[np.uint8]], None]
"""Gets what a command has made: parameters' bytes, fp32 or in the copy's format, or a delta; valid during the call."""

PutWeights = Callable[[Extent, NDArray[np.uint8]], bool]
"""Writes the weights of an extent's split master into memory, from the model's tensors; False where they have none."""

TIMEOUT_S = 600.0
"""For one run: a board needs milliseconds, a simulated kernel on a busy machine a minute."""


def build_of(device: Device) -> KernelConfig:
    """The configuration of what a device computes."""
    return device.build if isinstance(device, CheckedDevice) else device.identity.config


class Slot:
    """Device memory for the stored arrays of one extent, and what they hold."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.host: dict[str, NDArray[np.uint8]] = {}
        """Arrays that the device has no part in, page aligned: written like the others, never read."""
        self.extent: Extent | None = None
        self.step = -1
        """The step whose state of `extent` is in the buffers; -1: none, as they are being changed."""
        self.weights: NDArray[np.uint8] | None = None
        """Of a split master, as the last step committed them: the next one writes what changes; None: all of them."""

    def holds(self, extent: Extent, step: int) -> bool:
        """Whether that extent, as it is at that step, needs no reading."""
        return (self.extent, self.step) == (extent, step)

    def memory(self, array: StateArray, extent: Extent) -> NDArray[np.uint8]:
        """Memory for file I/O of an extent's array."""
        if array.name in self.host:
            return self.host[array.name][: array.extent_bytes(extent)]
        buffer = self.buffers[array.name]
        return (buffer.host if buffer.p2p is None else buffer.p2p)[: array.extent_bytes(extent)]


class Staging:
    """A command's gradients, `g`, and its low-precision copy or delta, `copy`, in device memory."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.ticket: int | None = None
        """Of the command that has the buffers; None: they are free."""
        self.params, self.started_s = 0, 0.0
        self.completion: Completion | None = None
        """Of that command, once it was waited for."""
        self.end: Callable[[Completion], None] = lambda completion: None
        """Looks at its completion, and hands over what it made."""


class Transfer:
    """One device's slots, and the buffers of its commands.

    `read` and `write` are file I/O, for any thread. Everything else uses the device: one thread at a time.
    """

    def __init__(
        self,
        device: Device,
        store: StateStore,
        traffic: Traffic,
        slots: int,
        put_weights: PutWeights,
        timeline: Timeline,
        number: int = 0,
        stream_bytes: int = 0,
    ) -> None:
        """timeline: gets a span for each command, of the device's `number`.

        stream_bytes: of the longest compressed gradient, 0 where none comes.
        """
        self.device, self.slots = device, list[Slot]()
        self._timeline, self._row, self._idle_since_s = timeline, f"device {number}: commands", 0.0
        self._store, self._traffic, self._put_weights = store, traffic, put_weights
        longest = store.manifest.extents[0]
        self._arrays = [array for array in store.manifest.stored if array.name not in HOST_ARRAYS]
        self._host_arrays = [array for array in store.manifest.arrays if array.name in HOST_ARRAYS]
        self._stagings = deque[Staging]()
        """The next command's is the first, with the oldest command in flight."""
        try:
            for _ in range(slots):
                self.slots.append(Slot())
                for array in self._host_arrays:
                    self.slots[-1].host[array.name] = aligned_buffer(array.extent_bytes(longest))
                for array in self._arrays:
                    self.slots[-1].buffers[array.name] = device.allocate(array.extent_bytes(longest))
            for _ in range(IN_FLIGHT):
                self._stagings.append(Staging())
                self._stagings[-1].buffers["g"] = device.allocate(max(longest.size_bytes, stream_bytes))
                self._stagings[-1].buffers["copy"] = device.allocate(longest.size_bytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the device memory back; it may be called twice."""
        for buffers in (*(staging.buffers for staging in self._stagings), *(slot.buffers for slot in self.slots)):
            for buffer in buffers.values():
                self.device.free(buffer)
            buffers.clear()
        self._stagings.clear()
        self.slots = []

    # File I/O

    def read(self, slot: Slot, extent: Extent) -> None:
        """Bring an extent's committed arrays into a slot. Raises StateError for damaged data.

        The weights of a split master come from the model's tensors, which have them already.
        """
        slot.extent, slot.step = extent, -1
        for array in self._arrays:
            memory = slot.memory(array, extent)
            if array.name == "weight" and self._put_weights(extent, memory):
                self._check_weights(extent, memory)
                crosses = memory.size if slot.buffers[array.name].p2p is not None else 0  # else `enter` counts it
                self._traffic.add(to_device_bytes=crosses)
                continue
            self._store.read(array.name, extent, memory)
            self._traffic.add(flash_read_bytes=memory.size)
        slot.step = self._store.steps

    def _check_weights(self, extent: Extent, memory: NDArray[np.uint8]) -> None:
        """Raise StateError unless the tensors hold what the last step has written."""
        if not self._store.holds("weight", extent, memory):
            raise StateError(
                f"the weights in {self._store.manifest.names_in(extent)} must be changed by this optimizer only, as "
                f"they are half of their masters, but they are not those of step {self._store.steps}: call "
                "accept_parameters() after each change that is meant"
            )

    def keep_weights(self, slot: Slot) -> None:
        """Copy the weights of a split master, as they were read, before they are updated in place; where this pays."""
        weight = self._arrays[0]
        if weight.name == "weight":
            assert slot.extent is not None, "only a slot that was read has weights"
            slot.weights = None
            if not self._store.begin_uncompared(slot.extent):
                memory = slot.memory(weight, slot.extent)
                slot.weights = reuse_buffer(memory.size)
                slot.weights[:] = memory

    def write(self, slot: Slot) -> None:
        """Write a slot's arrays to the spare slot on flash, parameters first. Raises StorageFullError, StateError.

        Of the weights of a split master only what changed, where that is less.
        """
        assert slot.extent is not None, "only a slot that was read is written"
        for array in (*self._arrays, *self._host_arrays):
            memory = slot.memory(array, slot.extent)
            before = slot.weights if array.name == "weight" else None
            written_bytes = self._store.write(array.name, slot.extent, memory, before)
            # What lies in the host's memory crosses the link on its way to the device's flash.
            crosses = memory.size if array in self._host_arrays else 0
            self._traffic.add(flash_written_bytes=written_bytes, to_device_bytes=crosses)
        slot.step = self._store.steps + 1

    # The device

    def enter(self, slot: Slot) -> None:
        """Bring what was read into device memory, where the device has no window of its own."""
        self._sync(slot, down=True)

    def leave(self, slot: Slot) -> None:
        """Bring the arrays to where they are written from."""
        self._sync(slot, down=False)

    def gradients(self, params: int) -> NDArray[np.float32]:
        """Memory for the gradients of a run's `params` parameters, fp32, before `submit`. Raises as `finish`."""
        return self._next_staging().buffers["g"].host[: params * FP32.bytes].view(np.float32)

    @property
    def takes_bf16(self) -> bool:
        """Whether the device reads bf16 gradients, which `bf16_gradients` is the memory for."""
        build = build_of(self.device)
        return isinstance(build, UpdateConfig) and "bf16" in build.gradients

    @property
    def writes_delta(self) -> bool:
        """Whether the device can send what changes in the place of a low-precision copy."""
        build = build_of(self.device)
        return isinstance(build, UpdateConfig) and build.delta

    def bf16_gradients(self, params: int) -> NDArray[np.uint16]:
        """Memory for the bf16 gradients of a run's `params` parameters, before `submit`. Raises as `finish`."""
        return self._next_staging().buffers["g"].host[: params * BF16.bytes].view(np.uint16)

    def submit(
        self,
        slot: Slot,
        run: ParameterRun,
        receive: Receive | None,
        stream: NDArray[np.uint8] | None = None,
        *,
        bf16: bool = False,
        delta: bool = False,
    ) -> None:
        """Start the update of a run within the slot's extent; `finish`, or the next but one, ends it.

        receive: gets the new parameters, or with `delta` what the run's copy changes (nearflash.abi.delta), when the
        command has ended. stream: the gradients where they are compressed (nearflash.abi.topk), else None: `gradients`
        has them, or with bf16 `bf16_gradients`, without the run's factor. Raises DeviceError, and as `finish`.
        """
        assert slot.extent is not None, "only a slot that was read is updated"
        staging, params, first = self._next_staging(), run.stop - run.start, run.start - slot.extent.start
        buffers, slot.step = staging.buffers, -1
        if stream is not None:
            buffers["g"].host[: stream.size] = stream
        dense = params * (BF16 if bf16 else FP32).bytes
        self._move(buffers["g"], 0, dense if stream is None else stream.size, down=True)
        gradient = GradientFormat.BF16 if bf16 else GradientFormat.FP32
        master = self._store.manifest.master
        stored = {
            array.name: slot.buffers[array.name].address + array.size_bytes(first)
            for array in self._arrays
            if array.name in (*master.arrays, *run.rule.arrays)
        }
        if self.device.DEPTH == 1:  # it would wait itself, not as long
            self._wait_all()
        staging.params, staging.started_s = params, time.perf_counter()
        staging.ticket = self.device.submit(
            UpdateCommand(
                run.rule,
                params,
                inputs={"g": buffers["g"].address, **stored},
                outputs={**stored, "copy": buffers["copy"].address},
                copy=CopyFormat.NONE if master is MasterFormat.SPLIT and not delta else run.copy,
                gradient=gradient if stream is None else GradientFormat.TOPK,
                gradient_bytes=0 if stream is None else stream.size,
                first_param=run.start,
                gradient_scale=run.scalar if bf16 else 1.0,
                delta=delta,
                master=master,
            )
        )
        staging.end = lambda completion: self._end(completion, buffers["copy"], slot, run, receive, delta=delta)
        self._stagings.rotate(-1)

    def finish(self) -> None:
        """End all commands, the oldest first.

        Raises DeviceError, WaitTimeoutError, NonFiniteError, StreamError, and what their `receive` raises.
        """
        for _ in range(IN_FLIGHT):
            self._next_staging()
            self._stagings.rotate(-1)

    def abandon(self) -> None:
        """Wait for all commands and take nothing of what they made."""
        with suppress(NearflashError):
            self._wait_all()
        self._free_stagings()

    def _next_staging(self) -> Staging:
        """The first staging, when its command has ended."""
        staging = self._stagings[0]
        if staging.ticket is not None:
            completion = self._wait(staging)
            staging.ticket = staging.completion = None
            staging.end(completion)
        return staging

    def _wait_all(self) -> None:
        for staging in self._stagings:
            if staging.ticket is not None:
                self._wait(staging)

    def _wait(self, staging: Staging) -> Completion:
        if staging.completion is None:
            assert staging.ticket is not None, "a command has the buffers"
            staging.completion = self.device.wait(staging.ticket, TIMEOUT_S)
            # One that was submitted early begins when the one before has ended.
            begun, self._idle_since_s = max(staging.started_s, self._idle_since_s), time.perf_counter()
            self._timeline.add("update", self._row, begun, self._idle_since_s, params=staging.params)
        return staging.completion

    def _free_stagings(self) -> None:
        for staging in self._stagings:
            staging.ticket = staging.completion = None

    def _end(
        self,
        completion: Completion,
        copy: Buffer,
        slot: Slot,
        run: ParameterRun,
        receive: Receive | None,
        *,
        delta: bool,
    ) -> None:
        self._traffic.add(completion.counters)
        if nonfinite := completion.counters.get("nonfinite_gradients", 0):
            raise NonFiniteError(
                f"gradients must stay as they were when they were checked, but {nonfinite} of parameters "
                f"[{run.start}, {run.stop}) are not finite any more; do not write to them during a step"
            )
        if receive is not None:
            receive(self._fetch_delta(copy) if delta else self._fetch_new(copy, slot, run))

    def _fetch_new(self, copy: Buffer, slot: Slot, run: ParameterRun) -> NDArray[np.uint8]:
        """The copy, or masters; of split ones the weights, and both halves where tensors are fp32."""
        master, params = self._store.manifest.master, run.stop - run.start
        if master is MasterFormat.FP32 and run.copy:
            return self._fetch(copy, 0, params * BF16.bytes)
        first = run.start - (slot.extent.start if slot.extent else 0)
        parts = [
            self._fetch(slot.buffers[array.name], array.size_bytes(first), array.size_bytes(params))
            for array in map(self._store.manifest.array, master.arrays[:1] if run.copy else master.arrays)
        ]
        if len(parts) == 1:
            return parts[0]
        masters = reuse_buffer(params * FP32.bytes)
        halves = (part.view(np.uint16) for part in parts)
        join_master(dict(zip(master.arrays, halves, strict=True)), masters.view(np.float32))
        return masters

    def _fetch(self, buffer: Buffer, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Bring bytes of device memory to the host."""
        self._move(buffer, offset, size_bytes, down=False)
        return buffer.host[offset : offset + size_bytes]

    def _fetch_delta(self, buffer: Buffer) -> NDArray[np.uint8]:
        """Its header, and then as much as this states. Raises StreamError."""
        self._move(buffer, 0, HEADER_BYTES, down=False)
        size_bytes = DeltaHeader.size_in(buffer.host[:HEADER_BYTES].tobytes())
        if not HEADER_BYTES <= size_bytes <= buffer.size_bytes:
            raise delta_error(StreamFault.LENGTH, f"{size_bytes} bytes in its header")
        self._move(buffer, HEADER_BYTES, size_bytes - HEADER_BYTES, down=False)
        return buffer.host[:size_bytes]

    def reset(self) -> None:
        """After a failure: the device is idle, and the slots hold nothing."""
        self.forget(before=0)
        self._free_stagings()
        self.device.reset()

    def forget(self, before: int) -> None:
        """Slots that hold states of step `before` or later hold nothing."""
        for slot in self.slots:
            slot.step = slot.step if slot.step < before else -1

    def _sync(self, slot: Slot, *, down: bool) -> None:
        assert slot.extent is not None
        for array in self._arrays:
            buffer = slot.buffers[array.name]
            if buffer.p2p is None:
                self._move(buffer, 0, array.extent_bytes(slot.extent), down=down)

    def _move(self, buffer: Buffer, offset: int, size_bytes: int, *, down: bool) -> None:
        links = self.device.links
        before = links.to_device, links.from_device
        (buffer.sync_to_device if down else buffer.sync_from_device)(offset, size_bytes)
        self._traffic.add(to_device_bytes=links.to_device - before[0], from_device_bytes=links.from_device - before[1])
