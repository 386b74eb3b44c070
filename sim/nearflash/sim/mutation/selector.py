"""Vectors of the selector: masks of selections by count and by mass, from the model."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.numbers import KEY_LOCAL
from nearflash.gateware.topk.select import RadixSelector
from nearflash.model.topk.select import select, select_mass
from nearflash.model.topk.selection import probability_keys, weights
from nearflash.sim.ports import words_from_integers

__all__ = ["selector", "vectors"]

_ENTRIES, _SELECTIONS = 64, 80
_BEAT_BITS = 4 * 16 + 4 + 4 + 1


def selector() -> RadixSelector:
    """A small selector of the kind that attention uses."""
    return RadixSelector(_ENTRIES, weighted=True)


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Selections of 1 to 64 entries, by turns by count of any keys and by mass of summed probabilities."""
    commands, beats, masks = [], [], []
    for number in range(_SELECTIONS):
        size = int(rng.choice([rng.integers(1, _ENTRIES + 1), _ENTRIES]))
        local = size - int(rng.choice([0, 0, 1, 5])) if size > 5 else size
        count, mass = int(rng.integers(0, size + 3)), 0
        if number % 2:
            summed, mass = _exact(rng) if number % 8 > 1 else (_summed(rng, size), int(rng.integers(1, 1 << 16)))
            size, local = len(summed), min(local, len(summed)) if number % 8 == 1 else len(summed)
            keys, count = probability_keys(summed), max(count, 2 * size // 3)
        else:
            keys = _keys(rng, size)
        chosen = np.where(np.arange(size) >= local, np.uint16(KEY_LOCAL), keys)
        mask = select_mass(chosen, weights(summed), mass, count) if mass else select(chosen, count)
        commands.append(count | mass << 18)
        beats += _beats(keys, local)
        bits = np.concatenate([mask, np.zeros(-size % 4, bool)]).reshape(-1, 4) @ (1, 2, 4, 8)
        masks += [*bits[:-1].tolist(), int(bits[-1]) | 1 << 4]
    inputs = {"i_command": np.array(commands, np.uint64), "i": words_from_integers(beats, _BEAT_BITS)}
    return inputs, {"o": np.array(masks, np.uint8)}


def _keys(rng: np.random.Generator, size: int) -> NDArray[np.uint16]:
    """Any keys; few different ones; keys that share the first digit."""
    kind = rng.integers(3)
    if kind == 0:
        return rng.integers(0, 1 << 16, size).astype(np.uint16)
    if kind == 1:
        return rng.choice(rng.integers(0, 1 << 16, 3), size).astype(np.uint16)
    return (int(rng.integers(256)) << 8 | rng.integers(0, 256, size)).astype(np.uint16)


def _summed(rng: np.random.Generator, size: int) -> NDArray[np.int64]:
    """Long-tailed; nearly equal; one of the largest."""
    kind = rng.integers(3)
    if kind == 0:
        return np.minimum(2.0 ** rng.normal(14, 5, size), (1 << 27) - 1).astype(np.int64) + 1
    if kind == 1:
        return rng.integers(1 << 20, (1 << 20) + 5000, size)
    return np.where(np.arange(size) == rng.integers(size), (1 << 27) - 1, 3)


def _exact(rng: np.random.Generator) -> tuple[NDArray[np.int64], int]:
    """Weights of 2^16 in all, times a power of two; a mass that some of them reach exactly or just miss."""
    while True:
        summed = rng.integers(940, 1121, _ENTRIES)
        summed[-1] += (1 << 16) - summed.sum()
        if 0 <= summed[-1] < 2048:
            break
    reached = np.cumsum(-np.sort(-summed))[rng.integers(0, _ENTRIES - 1)]
    return summed << int(rng.integers(0, 16)), int(reached + rng.integers(0, 2))


def _beats(keys: NDArray[np.uint16], local: int) -> list[int]:
    """Key beats as integers."""
    beats = []
    for start in range(0, len(keys), 4):
        four = keys[start : start + 4].tolist()
        bits = sum(key << 16 * lane for lane, key in enumerate(four))
        bits |= sum(1 << 64 + lane for lane in range(len(four)) if start + lane >= local)
        beats.append(bits | (1 << len(four)) - 1 << 68 | (start + 4 >= len(keys)) << 72)
    return beats
