"""Attention over stored KV: the interface of CpuEngine, DeviceEngine and CsdArray."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import UnsupportedError
from nearflash.support.closing import Closing

__all__ = ["Engine", "EngineCounters"]


@dataclass
class EngineCounters:
    """Counts of an engine's work since it was made. Several threads may `count` and time phases (`time_phase`)."""

    heads: int = 0
    """Heads attended: one for each sequence, layer and KV head of a call."""
    flash_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of pages read from flash for attention, by kind: `token`, `index`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by phase, as the engine names them: `append`, `attend`, …"""
    _lock: Lock = field(default_factory=Lock, init=False, repr=False, compare=False)

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - start

    def count(self, kind: str, size_bytes: int) -> None:
        """Add bytes read from flash."""
        with self._lock:
            self.flash_bytes[kind] = self.flash_bytes.get(kind, 0) + size_bytes

    def take(self) -> "EngineCounters":
        """Return these counters and set them to zero; of an engine whose counters are a copy (CsdArray) use `-`."""
        taken = EngineCounters(self.heads, self.flash_bytes, self.seconds)
        self.heads, self.flash_bytes, self.seconds = 0, {}, {}
        return taken

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        return self._combine(other, 1)

    def __sub__(self, earlier: "EngineCounters") -> "EngineCounters":
        return self._combine(earlier, -1)

    def _combine(self, other: "EngineCounters", sign: int) -> "EngineCounters":
        kinds, phases = (self.flash_bytes | other.flash_bytes), (self.seconds | other.seconds)
        return EngineCounters(
            self.heads + sign * other.heads,
            {kind: self.flash_bytes.get(kind, 0) + sign * other.flash_bytes.get(kind, 0) for kind in kinds},
            {phase: self.seconds.get(phase, 0.0) + sign * other.seconds.get(phase, 0.0) for phase in phases},
        )


class Engine(Closing, ABC):
    """Holds the KV of sequences and attends to it. Its calls may come from several threads: they run one by one.

    What an engine raises beside the errors named here is what its store and its device raise.
    """

    name: str
    """For messages: `cpu`, `verilator:attend-tiny`."""
    kv_heads: int
    """KV heads of a layer that this engine holds."""
    torch_device: torch.device | None = None
    """Where `attend_tensor` takes q; None: it takes none."""

    @abstractmethod
    def add(self) -> int:
        """A new sequence's number."""

    @abstractmethod
    def free(self, sequence: int) -> None:
        """Forget a sequence; its pages may be erased."""

    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one; what is stored is shared. Raises UnsupportedError without it."""
        raise UnsupportedError(f"engine must be one that forks sequences, not {self.name}")

    def crop(self, sequence: int, length: int) -> None:
        """Keep the first `length` tokens of a sequence, in every layer.

        Raises CommandError for more than every layer has; UnsupportedError without it.
        """
        raise UnsupportedError(f"engine must be one that crops sequences, not {self.name}")

    @abstractmethod
    def append(self, sequence: int, layer: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        """Store k and v (kv_heads, t, d) of t tokens after what is there.

        Raises ShapeError; StorageFullError before anything changed.
        """

    @abstractmethod
    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Attention of each sequence's last token over all tokens appended, that one included.

        q and the result (fp32, of a precision that is the engine's) are (len(sequences), kv_heads, g, d); `scaling` of
        q·K is 1/sqrt(d) by default. Or (len(sequences), kv_heads, t, g, d), of the last t tokens, each of which sees
        the tokens up to itself: then all are read, whatever the policy. With `softcap` logits are softcap·tanh(logit /
        softcap). sinks (kv_heads, g): logits that join the softmax and have no value. Raises UnsupportedError where the
        engine has neither; ShapeError for more tokens than there are.
        """

    def attend_tensor(
        self, layer: int, sequences: Sequence[int], q: torch.Tensor, scaling: float | None = None, *,
        softcap: float | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`attend` with tensors on `torch_device`, the result, too. Raises UnsupportedError without it."""
        raise UnsupportedError(f"engine must be one that takes tensors, not {self.name}")

    @property
    def takes_predictions(self) -> bool:
        """Whether it has `predict`, and attends by what that was given."""
        return False

    def predict(self, layer: int, sequences: Sequence[int], q: NDArray[np.float32]) -> None:
        """Take q (len(sequences), kv_heads, g, d) of the next `attend` of a layer, as the layer before predicts it.

        What that call will read may be chosen, and its reads begun. Raises UnsupportedError without it.
        """
        raise UnsupportedError(f"engine must be one that takes predictions, not {self.name}")

    @property
    def takes_masks(self) -> bool:
        """Whether it has `attend_masked`."""
        return False

    def attend_masked(
        self, layer: int, sequence: int, q: NDArray[np.float16], visible: NDArray[np.bool_],
        scaling: float | None = None, *, softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """`attend` of t queries (kv_heads, t, g, d) of one sequence, each to its `visible` (t, tokens) tokens alone.

        All are read, whatever the policy. Raises UnsupportedError without it.
        """
        raise UnsupportedError(f"engine must be one that takes masks, not {self.name}")

    @property
    def lengths(self) -> Mapping[int, int]:
        """Tokens that every layer has, by sequence. Raises UnsupportedError without it."""
        raise UnsupportedError(f"engine must be one that lists sequences, not {self.name}")

    @property
    def is_kept(self) -> bool:
        """Its sequences outlast it."""
        return False

    @property
    def notes(self) -> Mapping[int, Mapping[str, Any]]:
        """The last `note` of each sequence that outlasts the engine; nothing where none does."""
        return {}

    def note(self, sequence: int, info: Mapping[str, Any]) -> None:
        """Keep info (JSON values) with a sequence, where that outlasts the engine. Raises CommandError, StateError."""

    def flush(self) -> None:
        """Return when what was appended is durable, where it outlasts the engine.

        Raises StorageFullError where there is no room for the tokens after the last full KV page groups.
        """

    @property
    @abstractmethod
    def counters(self) -> EngineCounters:
        """Counts of the work so far; they may go on counting, or be a copy."""

    @abstractmethod
    def close(self) -> None:
        """Release store and device; it may be called twice."""
