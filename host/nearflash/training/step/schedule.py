"""The schedule of a step: on every device a pipeline of three stages, read - update - write, over a few slots.

       extents        ┌────── free slots ◄──────┐
    ──────────► read ─┴─► ready ─► update ─► done ─► write        threads read, one updates, threads write

A thread that reads or writes computes checksums, too, hence several of them, so that the drive never waits. No
device waits for another. After the first failure all stages stop; `finish` raises it, with store, slots and devices as
before the step. Threads live as long as their step.

Slots keep what they hold after it was written: with `resident_bytes` the extents that a step wrote last, with which
the next step begins, are not read again.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from nearflash.abi.errors import NearflashError
from nearflash.device import Device
from nearflash.storage import Extent, StateStore
from nearflash.support.buffers import BufferPool
from nearflash.support.queues import WorkQueue
from nearflash.support.timeline import Timeline
from nearflash.training.step.stalls import Stalls
from nearflash.training.step.traffic import Traffic
from nearflash.training.step.transfer import PutWeights, Slot, Transfer

__all__ = ["SLOTS", "Schedule", "Step"]

READERS = WRITERS = 3
MIN_SLOTS, SLOTS = 8, 32
"""Extents in a device's memory at once: MIN_SLOTS for the stages, up to SLOTS within AHEAD_BYTES to be read ahead."""
AHEAD_BYTES = 100 << 20
"""What a drive reads while the norm of 10^8 gradients is taken.

After that a few slots are reused, as each stage takes the newest: small ones are still in the processor's cache, where
a drive whose data a processor moves, as a virtual one's, is faster than in memory."""

Update = Callable[[Transfer, Slot, Callable[[], None]], None]
"""What the update stage does with an extent; the last is called when it is done, by then or by a later call."""


class Schedule:
    """The devices of a store, in its order; `begin` starts a step."""

    def __init__(
        self,
        store: StateStore,
        devices: Sequence[Device],
        traffic: Traffic,
        timeline: Timeline,
        resident_bytes: int,
        stream_bytes: int,
        put_weights: PutWeights,
    ) -> None:
        """resident_bytes: of device memory, over all devices, for extents that need not be read again.

        stream_bytes: of the longest compressed gradient of an extent, 0 where none comes. put_weights: as of Transfer.
        """
        self.store, self.timeline = store, timeline
        self.step: Step | None = None
        """The step that was begun last."""
        self.transfers: list[Transfer] = []
        manifest = store.manifest
        slot_bytes = sum(array.extent_bytes(manifest.extents[0]) for array in manifest.stored)
        most = -(-len(manifest.extents) // len(devices))
        self.keeps = resident_bytes > 0
        """Whether slots are searched before the file is read."""
        ahead = min(SLOTS, max(MIN_SLOTS, AHEAD_BYTES // slot_bytes))
        slots = max(1, min(most, ahead + resident_bytes // len(devices) // slot_bytes))
        try:
            for number, device in enumerate(devices):
                transfer = Transfer(device, store, traffic, slots, put_weights, timeline, number, stream_bytes)
                self.transfers.append(transfer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Discard what is in flight and give device memory back; it may be called twice."""
        if self.step is not None and not self.step.ended:
            self.step.discard()
        self.step = None
        for transfer in self.transfers:
            transfer.close()
        self.transfers.clear()

    def order(self) -> list[Extent]:
        """The extents as the next step best takes them: reversed each time, so that the last are the first."""
        extents = list(self.store.manifest.extents)
        return extents if self.store.steps % 2 == 0 else extents[::-1]

    def forget(self) -> None:
        """The store's state was replaced: what is in device memory does not count any more."""
        for transfer in self.transfers:
            transfer.forget(before=0)

    def begin(self) -> "Step":
        """Start a step: its reading, that is, of what `offer` gives.

        A step before it that an interrupt left in flight is discarded: it would use the same slots.
        """
        if self.step is not None and not self.step.ended:
            self.step.discard()
        return Step(self)


class Step:
    """One step in flight. As a context manager it is discarded at the end unless `finish` has succeeded."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._began = time.perf_counter()
        self._released = self._ended = 0.0
        self.offered: list[Extent] = []
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._discarded = False
        self.update: Update | None = None
        self._pipelines = [Pipeline(self, schedule, transfer) for transfer in schedule.transfers]
        schedule.step = self  # before any thread is there: an interrupt loses none of them
        try:
            for pipeline in self._pipelines:
                pipeline.begin()
        except BaseException:
            self.discard()
            raise

    @property
    def ended(self) -> bool:
        """Whether no stage runs any more: all is written, or discarded."""
        return self._discarded or bool(self._ended)

    def offer(self, extents: Iterable[Extent]) -> None:
        """Have extents read, in this order; those that were offered before are left out."""
        known = {extent.index for extent in self.offered}
        for extent in extents:
            if extent.index not in known:
                self.offered.append(extent)
                self._pipelines[self._schedule.store.device_of(extent)].extents.put(extent)

    def release(self, update: Update) -> None:
        """Let the update stage begin; called again, it does this to extents that it has not begun with."""
        first, self.update = self.update is None, update
        if first:
            self._released = time.perf_counter()
            for pipeline in self._pipelines:
                pipeline.release()

    def finish(self) -> None:
        """Wait until all that was offered is written.

        Raises the first error of any stage; then `discard` what was done.
        """
        for pipeline in self._pipelines:
            pipeline.extents.end()
        self._join()
        self._ended = time.perf_counter()
        if self.error is not None:
            raise self.error

    def discard(self) -> None:
        """Stop, and leave store and slots as before the step; after an error of a stage, reset the devices."""
        if self._discarded:
            return
        self.abort()
        self._join()
        self._schedule.store.discard()
        for transfer in self._schedule.transfers:
            transfer.forget(before=self._schedule.store.steps + 1)
            if self.error is not None:
                with contextlib.suppress(NearflashError):
                    transfer.reset()
        self._discarded = True

    def abort(self, error: BaseException | None = None) -> None:
        """Have all stages stop as soon as they can, because of the error where one is given; from any thread."""
        with self._lock:
            self.error = self.error or error
        for pipeline in self._pipelines:
            pipeline.abort()

    @property
    def stalls(self) -> Stalls:
        """Waits of the stages; after `finish`."""
        each = [pipeline.waited for pipeline in self._pipelines]
        means = {name: sum(seconds[name] for seconds in each) / len(each) for name in each[0]}
        means["gradients"] += self._released - self._began
        return Stalls(self._ended - self._began, means)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is not None or not self._ended:
            self.discard()

    def _join(self) -> None:
        for pipeline in self._pipelines:
            pipeline.join()


class Pipeline:
    """One device's stages for one step."""

    def __init__(self, step: Step, schedule: Schedule, transfer: Transfer) -> None:
        # No circle: one that is closed gives its memory back at once, not when the interpreter collects.
        self._step: Step = weakref.proxy(step)
        self._schedule, self._transfer = schedule, transfer
        self.extents = WorkQueue[Extent]()
        newest = not schedule.keeps  # else what was written first is written over first
        self._free = BufferPool("slots", transfer.slots, newest_first=newest)
        self._ready = WorkQueue[Slot](producers=READERS, newest_first=newest)
        self._done = WorkQueue[Slot](newest_first=newest)
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Start the first stage."""
        for number in range(READERS):
            self._start(f"read {number}", self.extents, self._read, self._ready)

    def release(self) -> None:
        """Start the stages after the first."""
        for queue in (self.extents, self._free):
            queue.measure()
        self._start("update", self._ready, self._update, self._done)
        for number in range(WRITERS):
            self._start(f"write {number}", self._done, self._write, self._free)

    def abort(self) -> None:
        """Have all stages end."""
        for queue in (self.extents, self._free, self._ready, self._done):
            queue.abort()

    def join(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            if thread.ident is not None:  # else it was never started
                thread.join()

    @property
    def waited(self) -> dict[str, float]:
        """Seconds that a stage's thread waited, by what for."""
        return {
            "gradients": self.extents.waited_s / READERS,
            "read": self._ready.waited_s,
            "update": self._done.waited_s / WRITERS,
            "write": self._free.waited_s / READERS,
        }

    def _start(self, name: str, source: WorkQueue, act: Callable[[Any], Slot | None], sink: WorkQueue) -> None:
        device = self._schedule.transfers.index(self._transfer)
        thread = threading.Thread(
            target=self._run, args=(source, act, sink), name=f"device {device}: {name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run(self, source: WorkQueue, act: Callable[[Any], Slot | None], sink: WorkQueue) -> None:
        try:
            while (item := source.get()) is not None:
                if (slot := act(item)) is not None:
                    sink.put(slot)
        except BaseException as error:
            self._step.abort(error)
        finally:
            if sink is self._done and self._step.error is None:  # else the device is reset
                self._transfer.abandon()
            if sink is not self._free:
                sink.end()

    # Stages

    def _read(self, extent: Extent) -> Slot | None:
        step, keeps = self._schedule.store.steps, self._schedule.keeps
        slot = self._free.get(prefer=lambda slot: keeps and slot.holds(extent, step))
        if slot is not None and not (keeps and slot.holds(extent, step)):
            with self._span("flash read", extent):
                self._transfer.read(slot, extent)
        if slot is not None:
            self._transfer.keep_weights(slot)
        return slot

    def _update(self, slot: Slot) -> None:
        """The next extent's update is started before this one's is finished, where it has been read by then."""
        assert self._step.update is not None, "the stage begins with the release"
        transfer, done = self._transfer, self._done
        transfer.enter(slot)

        def leave() -> None:
            transfer.leave(slot)
            done.put(slot)

        self._step.update(transfer, slot, leave)
        if self._ready.is_empty:
            transfer.finish()

    def _write(self, slot: Slot) -> Slot:
        with self._span("flash write", slot.extent):
            self._transfer.write(slot)
        return slot

    def _span(self, name: str, extent: Extent | None) -> contextlib.AbstractContextManager[None]:
        return self._schedule.timeline.span(name, extent=-1 if extent is None else extent.index)
