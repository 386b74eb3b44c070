"""States of the random generators that a training step may draw from, as text that a store keeps with each step.

torch's of the processor and of each GPU, numpy's global one, Python's. Dropout draws from the first two, data loaders
and augmentations from any. A run that resumes sets them, and draws what the stopped run would have drawn.
"""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nearflash.abi.errors import StateError

__all__ = ["generator_states", "restore_generators", "seed_generators"]


def seed_generators(seed: int) -> None:
    """Begin all of them at a seed of at least 0; numpy's takes it modulo 2^32."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the global one is what scripts draw from
    random.seed(seed)


def generator_states() -> dict[str, Any]:
    """The states now: some 14 KB of strings and numbers."""
    kind, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": _text(torch.get_rng_state().numpy()),
        "cuda": [_text(state.numpy()) for state in cuda],
        "numpy": [_text(np.asarray(keys, "<u4")), int(position), int(has_gauss), float(cached)],
        "python": [kind, _text(np.array(words, "<u4")), gauss],
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set what `generator_states` gave; of GPUs those that are there. Raises StateError, with nothing set."""
    try:
        kind, words, gauss = states["python"]
        keys, position, has_gauss, cached = states["numpy"]
        python = (kind, tuple(map(int, np.frombuffer(_bytes(words), "<u4"))), gauss)
        torch_state = torch.frombuffer(bytearray(_bytes(states["torch"])), dtype=torch.uint8)
        cuda = [torch.frombuffer(bytearray(_bytes(state)), dtype=torch.uint8) for state in states["cuda"]]
        random.Random().setstate(python)
        torch.Generator().set_state(torch_state)
        numpys = ("MT19937", np.frombuffer(_bytes(keys), "<u4"), position, has_gauss, cached)
        np.random.RandomState().set_state(numpys)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateError(f"states of generators must be as they were stored, and are not: {error!r}") from error
    random.setstate(python)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpys)  # noqa: NPY002
    if torch.cuda.is_available():
        for index, state in enumerate(cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)


def _text(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
