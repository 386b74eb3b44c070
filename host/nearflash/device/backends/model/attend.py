"""Device `model` of the attend kernel: the bit-exact reference, for correctness rather than speed."""

from dataclasses import replace

import numpy as np

from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.descriptor import COMPLETION_BYTES, DESCRIPTOR_BYTES, AttendDescriptor, HeadCompletion
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.page_batch import PageBatch
from nearflash.abi.attention.page_operation import OPERATION_BYTES, OPERATION_COMPLETION_BYTES, OperationCompletion
from nearflash.abi.errors import AddressError
from nearflash.abi.kernel.commands import Command, Completion
from nearflash.abi.kernel.config import AttendConfig, attend_config
from nearflash.abi.python310 import Self
from nearflash.device.backends.model.nand import PAGES_PER_BLOCK, SimulatedNand
from nearflash.device.backends.model.pages import SimulatedPages
from nearflash.device.immediate import ImmediateDevice
from nearflash.device.memory import SimulatedMemory
from nearflash.model.attention.control.check import read_descriptor
from nearflash.model.attention.control.pages import PageSource, PagesRead
from nearflash.model.attention.head import attend_from
from nearflash.model.attention.memory.settings import HeadSettings

__all__ = ["AttendModelDevice"]

_COUNTERS = (
    "heads_done", "heads_faulty", "index_requests", "token_requests", "codewords_asked", "codewords_received",
    "codewords_corrected", "codewords_uncorrectable", "codewords_foreign",
)  # fmt: skip


class AttendModelDevice(ImmediateDevice):
    """Does a batch: heads through nearflash.model, and page operations, one after the other.

    The watchdog is not modelled (a page always comes), nor are bit errors. `nand` keeps its pages until the device is
    closed.
    """

    def __init__(
        self, config: AttendConfig, memory: SimulatedMemory | None = None, *, pages_per_block: int = PAGES_PER_BLOCK
    ) -> None:
        super().__init__("model", config, memory)
        self._config = config
        self.nand = SimulatedNand(pages_per_block)
        self._pages = SimulatedPages(config, self.memory, self.nand)

    @classmethod
    def open(cls, config: str) -> Self:
        """Open with the build configuration of that name. Raises ConfigError."""
        return cls(attend_config(config))

    def _run(self, command: Command) -> Completion:
        if isinstance(command, PageBatch):
            return self._run_operations(command)
        assert isinstance(command, AttendBatch)
        return self._run_heads(command)

    def _run_heads(self, batch: AttendBatch) -> Completion:
        heads, at = _Heads(self._config, self._pages, batch.contexts), self._pages.bytes_at
        for index in range(len(batch.descriptors)):
            record = at(batch.descriptors_address + index * DESCRIPTOR_BYTES, DESCRIPTOR_BYTES)
            completion = np.frombuffer(heads.run(record.tobytes()).pack(), np.uint8)
            at(batch.completions_address + index * COMPLETION_BYTES, COMPLETION_BYTES)[:] = completion
        return Completion(heads.counters)

    def _run_operations(self, batch: PageBatch) -> Completion:
        at = self._pages.bytes_at
        for index in range(len(batch.operations)):
            record = at(batch.operations_address + index * OPERATION_BYTES, OPERATION_BYTES)
            completion = OperationCompletion(self.nand.run(record.tobytes(), self._config, at))
            place = at(batch.completions_address + index * OPERATION_COMPLETION_BYTES, OPERATION_COMPLETION_BYTES)
            place[:] = np.frombuffer(completion.pack(), np.uint8)
        return Completion(dict.fromkeys(_COUNTERS, 0))


class _Heads:
    """The heads of one batch. From the first read outside the memory on every head has MEMORY."""

    def __init__(self, config: AttendConfig, pages: SimulatedPages, contexts: int) -> None:
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._config, self._pages, self._contexts = config, pages, contexts
        self._memory_fault = Fault(0)

    def run(self, record: bytes) -> HeadCompletion:
        """Compute one head; its output is in memory where it has no fault."""
        descriptor = read_descriptor(record, self._config, self._contexts)
        ended = self._attend(descriptor) if descriptor else HeadCompletion(Fault.DESCRIPTOR, 0, 0, 0, ())
        self.counters["heads_done"] += 1
        self.counters["heads_faulty"] += bool(ended.faults)
        return ended

    def _attend(self, one: AttendDescriptor) -> HeadCompletion:
        settings, at = HeadSettings.of(one), self._pages.bytes_at
        q = at(one.q_address, one.group * one.dim * 2).view(np.float16).reshape(one.group, -1)
        v_mean = at(one.v_mean_address, one.dim * 4).view(np.float32)
        try:
            source = self._source(one, settings)
            result = attend_from(source, q, v_mean, settings)
        except AddressError:
            self._memory_fault = Fault.MEMORY
            return HeadCompletion(Fault.MEMORY, 0, settings.entries(one.tokens), 0, ())
        self._count(source.read)
        if result.out is not None and not self._memory_fault:
            at(one.out_address, q.nbytes)[:] = result.out.reshape(-1).view(np.uint8)
        ended = result.completion(source.read.requests)
        return replace(ended, faults=ended.faults | self._memory_fault)

    def _source(self, one: AttendDescriptor, settings: HeadSettings) -> PageSource:
        blocks = settings.count_scanned(one.tokens) // max(one.block_tokens, 1)
        groups = -(-one.tokens // one.group_tokens)
        index_pages = blocks * settings.index_layout.pages if blocks else 0
        index_table = self._pages.bytes_at(one.index_table_address, 8 * index_pages).view(np.uint64)
        token_table = self._pages.bytes_at(one.token_table_address, 8 * groups).view(np.uint64)
        return PageSource(settings, one.page_tag, one.tokens, index_table, token_table, self._pages)

    def _count(self, read: PagesRead) -> None:
        counts = {
            "index_requests": read.index_requests,
            "token_requests": read.token_requests,
            "codewords_asked": read.codewords,
            "codewords_received": read.codewords,
            "codewords_uncorrectable": read.uncorrectable,
            "codewords_foreign": read.misdirected,
        }
        for name, count in counts.items():
            self.counters[name] += count
