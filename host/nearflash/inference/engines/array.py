"""KV heads over several devices: each holds some heads of every layer, and attends to them alone."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count, pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.errors import (
    CommandError,
    ConfigError,
    DeviceError,
    DeviceLostError,
    NearflashError,
    PageError,
    ShapeError,
    StateError,
    StorageFullError,
)  # fmt: skip
from nearflash.inference.engines.base import Engine, EngineCounters

__all__ = ["CsdArray", "split_heads"]

_T = TypeVar("_T")
_LOSSES = (DeviceError, TimeoutError, OSError)
"""Errors of a device, or its flash, that is gone; of a full flash or a damaged page the device itself is sound."""
_SOUND = (StorageFullError, PageError)


def split_heads(kv_heads: int, shares: Sequence[float]) -> list[int]:
    """KV heads of each device: at least one, else so that the largest of heads / share is as small as can be.

    Raises ConfigError where there are fewer heads than devices, or a share is not positive.
    """
    if not 1 <= len(shares) <= kv_heads or not all(share > 0 for share in shares):
        raise ConfigError(f"devices must be 1 to {kv_heads} (the KV heads), with positive shares, not {list(shares)!r}")
    heads = [1] * len(shares)
    for _ in range(kv_heads - len(shares)):
        heads[min(range(len(shares)), key=lambda i: (heads[i] + 1) / shares[i])] += 1
    return heads


class CsdArray(Engine):
    """An engine of engines: their KV heads one after the other, each call on all of them at once.

    Raises DeviceLostError, with device, KV heads and sequences in its message, when an engine's device or flash fails,
    and for every call but `free` and `close` afterwards: a sequence is of no use without some of its heads. A flash
    that is full leaves the sequence appended on other devices: it can be cropped or freed, all else is StateError. What
    an engine raises for one page or operand has a note that names the device.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise ConfigError("engines must be at least one, not none")
        self.engines = tuple(engines)
        bounds = [0, *accumulate(engine.kv_heads for engine in engines)]
        self.heads = tuple(range(start, end) for start, end in pairwise(bounds))
        """KV heads of each engine."""
        self.kv_heads = bounds[-1]
        self.name = "array of " + ", ".join(engine.name for engine in engines)
        self._numbers: dict[int, tuple[int, ...]] = {}
        self._torn: set[int] = set()
        self._next = count(1)
        self._lost: DeviceLostError | None = None
        self._pool = ThreadPoolExecutor(len(engines), "csd")

    def add(self) -> int:
        """A new sequence's number, of the array's own."""
        numbers = self._each(lambda place: self.engines[place].add())
        sequence = next(self._next)
        self._numbers[sequence] = tuple(numbers)
        return sequence

    def free(self, sequence: int) -> None:
        """Forget a sequence on every device that still works."""
        numbers = self._numbers_of(sequence)
        del self._numbers[sequence]
        self._torn.discard(sequence)
        for engine, number in zip(self.engines, numbers, strict=True):
            try:
                engine.free(number)
            except _LOSSES:
                if self._lost is None:
                    raise

    def fork(self, sequence: int) -> int:
        """See Engine.fork: on every device, or on none."""
        numbers, made = self._usable(sequence), dict[int, int]()

        def fork(place: int) -> None:
            made[engine] = self.engines[engine].fork(numbers[engine])

        try:
            self._each(fork)
        except BaseException:
            for engine, number in made.items() if self._lost is None else ():
                self.engines[engine].free(number)
            raise
        other = next(self._next)
        self._numbers[other] = tuple(made[engine] for engine in range(len(self.engines)))
        return other

    def crop(self, sequence: int, length: int) -> None:
        """See Engine.crop. A sequence that some devices rejected tokens of is whole again."""
        numbers = self._numbers_of(sequence)
        self._torn.add(sequence)
        self._each(lambda i: self.engines[i].crop(numbers[i], length))
        self._torn.discard(sequence)

    def append(self, sequence: int, layer: int, k: NDArray[np.float16], v: NDArray[np.float16]) -> None:
        """Store each engine's heads of k and v. See Engine.append."""
        self._check(k, 0)
        numbers = self._usable(sequence)
        self._torn.add(sequence)
        self._each(lambda i: self.engines[i].append(numbers[i], layer, k[self._own(i)], v[self._own(i)]))
        self._torn.discard(sequence)

    def attend(
        self, layer: int, sequences: Sequence[int], q: NDArray[np.float16], scaling: float | None = None, *,
        softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """Outputs of all engines, head by head. See Engine.attend."""
        self._check(q, 1)
        numbers = list(zip(*(self._usable(sequence) for sequence in sequences), strict=True))

        def attend(place: int) -> NDArray[np.float32]:
            part = self._own(place)
            return self.engines[place].attend(
                layer,
                numbers[place],
                q[:, part],
                scaling,
                softcap=softcap,
                sinks=None if sinks is None else sinks[part],
            )

        outs = self._each(attend)
        return np.concatenate(outs, axis=1)

    @property
    def takes_masks(self) -> bool:
        """See Engine.takes_masks."""
        return all(engine.takes_masks for engine in self.engines)

    def attend_masked(
        self, layer: int, sequence: int, q: NDArray[np.float16], visible: NDArray[np.bool_],
        scaling: float | None = None, *, softcap: float | None = None, sinks: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:  # fmt: skip
        """See Engine.attend_masked."""
        self._check(q, 0)
        numbers = self._usable(sequence)

        def attend(place: int) -> NDArray[np.float32]:
            part = self._own(place)
            some = None if sinks is None else sinks[part]
            return self.engines[place].attend_masked(
                layer, numbers[place], q[part], visible, scaling, softcap=softcap, sinks=some
            )

        return np.concatenate(self._each(attend), axis=0)

    @property
    def lengths(self) -> Mapping[int, int]:
        """See Engine.lengths."""
        by_engine = [engine.lengths for engine in self.engines]
        return {
            sequence: min(lengths[number] for lengths, number in zip(by_engine, numbers, strict=True))
            for sequence, numbers in self._numbers.items()
        }

    @property
    def counters(self) -> EngineCounters:
        """The sum of the engines': seconds are those of engines at work side by side."""
        return sum((engine.counters for engine in self.engines), EngineCounters())

    def close(self) -> None:
        """Close every engine."""
        self._pool.shutdown()
        for engine in self.engines:
            engine.close()

    def _check(self, array: NDArray[np.generic], axis: int) -> None:
        if array.shape[axis] != self.kv_heads:
            raise ShapeError(f"operand must have {self.kv_heads} KV heads, not the shape {array.shape}")

    def _own(self, place: int) -> slice:
        return slice(self.heads[place].start, self.heads[place].stop)

    def _usable(self, sequence: int) -> tuple[int, ...]:
        if sequence in self._torn and self._lost is None:
            raise StateError(
                f"sequence {sequence} must be cropped or freed: some devices hold tokens that others rejected"
            )
        return self._numbers_of(sequence)

    def _numbers_of(self, sequence: int) -> tuple[int, ...]:
        if sequence not in self._numbers:
            raise CommandError(f"sequence must be one that was added and not freed, not {sequence!r}")
        return self._numbers[sequence]

    def _each(self, call: Callable[[int], _T]) -> list[_T]:
        """The call for every engine at once. Raises the first engine's error when all have ended."""
        if self._lost is not None:
            raise self._lost
        futures = [self._pool.submit(call, number) for number in range(len(self.engines))]
        failures = [(number, failure) for number, future in enumerate(futures) if (failure := future.exception())]
        for number, failure in failures:
            if isinstance(failure, _LOSSES) and not isinstance(failure, _SOUND):
                self._lost = self._loss(number, failure)
                raise self._lost from failure
        for number, failure in failures:
            if isinstance(failure, NearflashError):
                failure.add_note(f"on {self._title(number)}")
            raise failure
        return [future.result() for future in futures]

    def _title(self, place: int) -> str:
        heads = self.heads[place]
        return f"device {place} ({self.engines[place].name}) with KV heads [{heads.start}, {heads.stop})"

    def _loss(self, place: int, failure: BaseException) -> DeviceLostError:
        sequences = ", ".join(map(str, self._numbers)) or "none"
        return DeviceLostError(
            f"{self._title(place)} must not fail: {failure}; lost: KV of sequences {sequences}; "
            "make an array without it and generate them again"
        )
