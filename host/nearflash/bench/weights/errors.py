"""Loss of a model whose stored weights, or K and V, have bit errors: with and without a correcting code.

Errors are independent, at a raw bit error rate, in the bytes as they are stored. The code is that of the project's
pages (abi.attention.codeword): BCH over GF(2^13), 16 errors of a codeword of 512 bytes of data with its check bits.
Decoding is taken as bounded by distance: up to 16 errors of a codeword are corrected, of more none is. Weights: the
decoder layers' matrices, dense in fp16, in codes of 8 and 4 bits, or coded losslessly, whose checksums reject a tensor
with any error. K and V: in fp16 and in groups of 4 bits, as read back from pages, the newest token's among them.

A row is of several seeds: the median of what the loss is more than with the same form read without errors, and its
range: the curves that KVNAND draws of raw bit errors.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from nearflash.abi.attention.codeword import BCH_ERRORS, CODEWORD_BYTES, MESSAGE_BYTES, PARITY_BYTES
from nearflash.abi.errors import NonFiniteError, StreamError
from nearflash.bench.inference.texts import read_texts
from nearflash.bench.weights.sizes import SizesSettings, load_named
from nearflash.offload.cache.groups import decode, encode
from nearflash.weights.compress import compress_tensor, dense_tensor
from nearflash.weights.convert import layer_weights
from nearflash.weights.expand import expand_packed
from nearflash.weights.file import PackedTensor
from nearflash.weights.perplexity import hold_out, perplexity, windows

__all__ = ["BitErrors", "measure"]

RATES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2)
"""Raw bit errors a bit; the last two are beyond what the code corrects."""
_MOST_UNCORRECTED = 1e-3
"""Without the code nothing is left of a model long before."""
SEEDS = (0, 1, 2)
WEIGHT_FORMS, KV_FORMS = ("dense", "int8", "int4", "coded"), ("fp16", "int4")
_TOKENS, _HELD_OUT_WINDOWS = 256, 4
_CHECK_BITS = 8 * (MESSAGE_BYTES - CODEWORD_BYTES + PARITY_BYTES)
"""Of a codeword, beside its data's."""


@dataclass
class BitErrors:
    """Independent bit errors in stored bytes, and how many there were."""

    rate: float
    corrected: bool
    """Whether a code corrects them."""
    generator: np.random.Generator
    bits: int = 0
    """Flipped and left so."""
    read_bits: int = 0
    """That errors came to, without check bits."""
    uncorrectable: int = 0
    """Codewords with more errors than the code corrects."""

    def flip(self, data: NDArray[np.uint8]) -> None:
        """Flip bits of bytes, in place."""
        count = self.generator.binomial(8 * data.size, self.rate)
        places = np.unique(self.generator.integers(0, 8 * data.size, count))
        if self.corrected:
            places = self._correct(places)
        np.bitwise_xor.at(data, places // 8, (1 << places % 8).astype(np.uint8))
        self.bits += places.size
        self.read_bits += 8 * data.size

    def _correct(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of errors that are left: those of codewords with too many."""
        codewords, counts = np.unique(places // (8 * CODEWORD_BYTES), return_counts=True)
        counts += self.generator.binomial(_CHECK_BITS, self.rate, counts.size)
        lost = codewords[counts > BCH_ERRORS]
        self.uncorrectable += lost.size
        return places[np.isin(places // (8 * CODEWORD_BYTES), lost)]


def measure(
    name: str, settings: SizesSettings, *, rates: tuple[float, ...] = RATES, seeds: tuple[int, ...] = SEEDS
) -> Iterator[dict[str, Any]]:
    """A row for each form, rate, and with and without the code. Raises MissingModelError."""
    model, tokenizer = load_named(name)
    model.requires_grad_(False)
    tokens = hold_out(windows(read_texts(tokenizer, settings.texts), _TOKENS), 1)[1][:_HELD_OUT_WINDOWS]
    names = layer_weights(model)
    whole = {each: model.get_parameter(each).half() for each in names}
    subjects: dict[str, tuple[str, ...]] = {"weights": WEIGHT_FORMS, "kv": KV_FORMS}
    for subject, forms in subjects.items():
        for form in forms:
            fresh = _Subject(model, whole, tokens, form) if subject == "weights" else _Pages(model, whole, tokens, form)
            clean, _ = fresh.loss(BitErrors(0.0, False, np.random.default_rng(0)))
            for rate in rates:
                for corrected in (False, True) if rate <= _MOST_UNCORRECTED else (True,):
                    tries = [BitErrors(rate, corrected, np.random.default_rng(seed)) for seed in seeds]
                    outcomes = [fresh.loss(errors) for errors in tries]
                    row = {"stored": f"{subject}, {form}", "bit_error_rate": rate, "corrected": corrected}
                    yield row | _sum_up(tries, outcomes, clean)


def _sum_up(
    tries: Sequence[BitErrors], outcomes: Sequence[tuple[float | None, int]], clean: float | None
) -> dict[str, Any]:
    """Sum up several seeds: the median of the losses, one that is not finite above all others, and their range.

    outcomes: loss, and how many tensors were rejected, of each.
    """
    more = sorted(math.inf if loss is None or clean is None else loss - clean for loss, _ in outcomes)
    finite, middle = [each for each in more if math.isfinite(each)], statistics.median_low(more)
    return {
        "seeds": len(tries),
        "bits_left_fraction": sum(each.bits for each in tries) / max(sum(each.read_bits for each in tries), 1),
        "codewords_uncorrectable": [each.uncorrectable for each in tries],
        "tensors_rejected": [rejected for _, rejected in outcomes],
        "loss_without_errors": clean,
        "loss_increase": middle if math.isfinite(middle) else None,
        "loss_increase_range": [finite[0], finite[-1]] if finite else None,
        "seeds_without_loss": len(more) - len(finite),
        "of": "nats a token, median of the seeds; none where it is not finite, or where a checksum rejects a tensor",
    }


class _Subject:
    """Weights of a model in a form, read back with errors."""

    def __init__(self, model: Any, whole: dict[str, Tensor], tokens: Tensor, form: str) -> None:
        self._model, self._tokens = model, tokens
        self._stored = [_store(name, weight.numpy(), form) for name, weight in whole.items()]
        self._clean: float | None = None

    def loss(self, errors: BitErrors) -> tuple[float | None, int]:
        """Nats a token, and how many tensors were rejected."""
        rejected = 0
        for stored in self._stored:
            data = stored.data.copy()
            errors.flip(data)
            try:
                weight = expand_packed(replace(stored, data=data)).view(np.float16)
            except StreamError:
                rejected += 1
            else:
                self._model.get_parameter(stored.name).copy_(torch.from_numpy(weight))
        if rejected:
            return None, rejected
        if errors.bits:
            return _finite_loss(self._model, self._tokens), 0
        if self._clean is None:
            self._clean = _finite_loss(self._model, self._tokens)
        return self._clean, 0


class _Pages:
    """K and V of a model in a form, read back with errors."""

    def __init__(self, model: Any, whole: dict[str, Tensor], tokens: Tensor, form: str) -> None:
        self._model, self._tokens, self._form = model, tokens, form
        self._clean: float | None = None
        self._sizes: list[int] = []
        for name, weight in whole.items():
            model.get_parameter(name).copy_(weight)

    def loss(self, errors: BitErrors) -> tuple[float | None, int]:
        """Nats a token; no tensor is rejected. The first call reads without errors."""
        if self._sizes and not self._has_errors(errors):
            return self._clean, 0
        sizes: list[int] = []
        found = _finite_loss(self._model, self._tokens, lambda: _ErrorCache(errors, self._form, sizes))
        if not self._sizes:
            self._clean, self._sizes = found, sizes
        return found, 0

    def _has_errors(self, errors: BitErrors) -> bool:
        """Whether errors are left in what is read: places do not depend on the bytes, and are drawn again then."""
        trial = replace(errors, generator=deepcopy(errors.generator))
        for size in self._sizes:
            trial.flip(np.zeros(size, np.uint8))
        if not trial.bits:
            errors.read_bits, errors.uncorrectable = trial.read_bits, trial.uncorrectable
        return trial.bits > 0


class _ErrorCache(DynamicCache):
    """Keys and values as pages with errors give them back."""

    def __init__(self, errors: BitErrors, form: str, sizes: list[int]) -> None:
        super().__init__()
        self._errors, self._form, self._sizes = errors, form, sizes

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See Cache.update."""
        states = [self._read_back(each) for each in (key_states, value_states)]
        held: tuple[Tensor, Tensor] = super().update(*states, *args, **kwargs)
        return held

    def _read_back(self, states: Tensor) -> Tensor:
        stored = (encode(states) if self._form == "int4" else states.half()).contiguous()
        data = stored.view(-1).view(torch.uint8).numpy()
        self._sizes.append(data.size)
        self._errors.flip(data)
        if self._form == "fp16":
            return stored.to(states.dtype)
        out = torch.empty_like(states)
        decode(stored, out)
        return out


def _store(name: str, weight: NDArray[Any], form: str) -> PackedTensor:
    if form == "dense":
        return dense_tensor(name, "F16", weight.shape, weight.view(np.uint8).reshape(-1))
    return compress_tensor(
        name, weight, *(("coded", 16) if form == "coded" else ("groups", int(form.removeprefix("int"))))
    )


def _finite_loss(model: Any, tokens: Tensor, cache: Callable[[], Any] | None = None) -> float | None:
    """Nats a token; None where they are not finite."""
    try:
        loss = math.log(perplexity(model, tokens, cache))
    except (OverflowError, NonFiniteError):  # of what a layer gave, as it is to be stored in 4 bits
        return None
    return loss if math.isfinite(loss) else None
