"""Attention by an attend device: page tables and queries go down, outputs come back.

KV page groups and index pages are read where the store's flash has them; what of the groups the store has in memory
is sealed into the device's, too.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attention.codeword import CODEWORD_BYTES, PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import DEVICE_GROUP_TOKENS
from nearflash.abi.errors import (
    CommandError,
    DeviceError,
    NearflashError,
    NonFiniteError,
    PageError,
    ShapeError,
    UnsupportedError,
)
from nearflash.abi.kernel.config import AttendConfig
from nearflash.device.base import Device
from nearflash.device.drivers.attend import AttendResult, Head, HeadOutput, attend, most_contexts
from nearflash.inference.engines.base import EngineCounters
from nearflash.inference.engines.device.suffixes import DeviceSuffixes
from nearflash.inference.engines.store import StoreEngine
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.storage.flash.geometry import PageNumbers
from nearflash.storage.kv import KvStore, StoredHead

__all__ = ["DeviceEngine"]

_FAULT_ERRORS: dict[Fault, type[NearflashError]] = {
    Fault.UNCORRECTABLE: PageError, Fault.MISDIRECTED: PageError, Fault.NONFINITE: NonFiniteError,
    Fault.SCORE_RANGE: CommandError, Fault.DESCRIPTOR: CommandError,
}  # fmt: skip
"""Faults of one head in its pages or numbers; every other one is of the device."""
_REFERENCE_LIMIT = (1 << 11) - 1


class DeviceEngine(StoreEngine):
    """Attends by the policy on `device`, whose memory or flash the store is on.

    The device is the engine's own from now on, as the store is. Raises CommandError for a device that is no attend
    kernel, or whose pages are smaller than the store's. A head's fault is raised as PageError, NonFiniteError or
    CommandError where its pages or numbers are at fault, else as DeviceError.
    """

    def __init__(self, device: Device, store: KvStore, policy: AttentionPolicy, *, first_head: int = 0) -> None:
        config = device.identity.config
        if not isinstance(config, AttendConfig) or store.layout.page_bytes > config.page_bytes:
            raise CommandError(
                f"device must be an attend kernel for pages of {store.layout.page_bytes} bytes, not {config.full_name}"
            )
        if store.layout.group_tokens > DEVICE_GROUP_TOKENS:
            raise CommandError(
                f"KV page groups for device {config.full_name} must have at most {DEVICE_GROUP_TOKENS} tokens, not "
                f"{store.layout.group_tokens}"
            )
        super().__init__(store, policy, first_head, device.identity.name)
        self.device, self._config = device, config
        self._suffixes = DeviceSuffixes(device, store, config.channels)
        self._references: dict[tuple[int, PageTag], tuple[int, ...]] = {}
        """By sequence and page tag, which forks have in common."""

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend; several tokens are as many heads for the device, of fewer tokens each."""
        if softcap is not None or sinks is not None:
            raise UnsupportedError(
                f"attention on {self.name} must be without softcap and sinks, which its kernel has not; use device cpu"
            )
        several = q.ndim == 5
        with self._lock:
            with self._counters.time_phase("place"):
                stored = [self.store.layer(sequence, layer) for sequence in sequences]
                suffixes = [self._suffixes.entries(head) for head in stored]
                heads = [
                    self._head(layer_kv, head, token_q, suffixes[row][head], scaling, tokens, several)
                    for row, (layer_kv, queries) in enumerate(zip(stored, q, strict=True))
                    for head in range(self.kv_heads)
                    for tokens, token_q in _by_token(layer_kv.tokens, queries[head] if several else queries[head][None])
                ]
            with self._counters.time_phase("attend"):
                done = self._run(heads)
            owners = np.repeat(sequences, len(heads) // max(len(sequences), 1)).tolist()
            for owner, head, result in zip(owners, heads, done.heads, strict=True):
                if result.completion.faults:
                    raise _error(head.descriptor.page_tag, result)
                if head.descriptor.mode & Mode.DENSE:
                    self._references[owner, head.descriptor.page_tag] = _reference(
                        result.completion.maximum[: q.shape[-2]]
                    )
            self._counters.heads += len(heads)
            return np.stack([result.value() for result in done.heads]).reshape(q.shape).astype(np.float32)

    @property
    def counters(self) -> EngineCounters:
        """See Engine.counters; bytes of `codeword` are all that the kernel asked for, of groups in memory too."""
        return self._counters

    def close(self) -> None:
        """See Engine.close."""
        self._suffixes.free()
        super().close()
        self.device.close()

    def _forget(self, sequence: int) -> None:
        self._suffixes.free(sequence)
        for key in [key for key in self._references if key[0] == sequence]:
            del self._references[key]

    def _truncate(self, sequence: int, length: int) -> None:
        self._suffixes.free(sequence)

    def _head(
        self, stored: StoredHead, head: int, q: NDArray[np.float16], suffix: NDArray[np.uint64], scaling: float | None,
        tokens: int, dense: bool,
    ) -> Head:  # fmt: skip
        page_tag = PageTag(stored.page_tag.sequence, stored.page_tag.layer, head)
        policy = AttentionPolicy() if dense else self._policy_at(page_tag.layer, head)
        descriptor = policy.descriptor(
            page_tag, self.store.shape.dim, tokens, len(q), self.store.layout,
            scaling=scaling, reference=self._references.get((stored.sequence, page_tag), ()),
        )  # fmt: skip
        index = stored.index_pages[head] if not descriptor.mode & Mode.DENSE else stored.index_pages[head, :0]
        pages = stored.token_pages[head, : stored.flash_tokens // self.store.layout.group_tokens]
        token_table, index_table = self._tables(stored, head, descriptor, q, pages, index)
        groups = np.concatenate([token_table, suffix])[: -(-tokens // self.store.layout.group_tokens)]
        return Head(descriptor, q, stored.v_mean[head], groups, index_table)

    def _tables(
        self, stored: StoredHead, head: int, descriptor: AttendDescriptor, q: NDArray[np.float16],
        pages: PageNumbers, index: PageNumbers,
    ) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:  # fmt: skip
        """Words of the page tables: of KV page groups on flash, of the index."""
        self.store.count_reads(np.concatenate([pages, index]))
        return self.store.table(pages), self.store.table(index)

    def _run(self, heads: Sequence[Head]) -> AttendResult:
        """Attend to all heads."""
        done = attend(self.device, heads, contexts=most_contexts(self._config, heads))
        for batch in done.batches:
            self._counters.count("codeword", batch.counters["codewords_asked"] * CODEWORD_BYTES)
        return done


def _by_token(tokens: int, q: NDArray[np.float16]) -> Iterator[tuple[int, NDArray[np.float16]]]:
    """Split the last tokens' q (t, g, d): how many tokens each sees, and its own (g, d)."""
    if len(q) > tokens:
        raise ShapeError(f"q must be of at most the {tokens} tokens that the sequence has, not {len(q)}")
    yield from enumerate(q, tokens - len(q) + 1)


def _reference(maximum: tuple[int, ...]) -> tuple[int, ...]:
    """The expected answer for the head's next token."""
    return tuple(max(-_REFERENCE_LIMIT, min(value, _REFERENCE_LIMIT)) for value in maximum)


def _error(page_tag: PageTag, result: HeadOutput) -> NearflashError:
    """The error that a head's faults mean, with its page_tag."""
    fault = next(fault for fault in Fault if fault & result.completion.faults)
    try:
        result.value()
    except DeviceError as error:
        kind = _FAULT_ERRORS.get(fault, DeviceError)
        return kind(f"sequence {page_tag.sequence}, layer {page_tag.layer}, head {page_tag.head}: {error}")
    raise AssertionError("a head with faults has no output")
