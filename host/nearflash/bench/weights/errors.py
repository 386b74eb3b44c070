"""Loss of a model whose stored weights, or K and V, have bit errors: with and without a correcting code.

Errors are independent, at a raw bit error rate, in the bytes as they are stored. The code is that of the project's
pages (abi.attention.codeword): BCH over GF(2^13), 16 errors of a codeword of 512 bytes of data with its check bits.
Decoding is taken as bounded by distance: up to 16 errors of a codeword are corrected, of more none is. Weights: the
decoder layers' matrices, dense in fp16, in codes of 8 and 4 bits, or coded losslessly, whose checksums reject a tensor
with any error. K and V: in fp16 and in groups of 4 bits, as read back from pages, the newest token's among them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from nearflash.abi.attention.codeword import BCH_ERRORS, CODEWORD_BYTES, MESSAGE_BYTES, PARITY_BYTES
from nearflash.abi.errors import StreamError
from nearflash.bench.inference.texts import read_texts
from nearflash.bench.weights.sizes import SizesSettings, load_named
from nearflash.offload.cache.groups import decode, encode
from nearflash.weights.compress import compress_tensor, dense_tensor
from nearflash.weights.convert import layer_weights
from nearflash.weights.expand import expand_packed
from nearflash.weights.file import PackedTensor
from nearflash.weights.perplexity import hold_out, perplexity, windows

__all__ = ["BitErrors", "measure"]

RATES = tuple(10.0**exponent for exponent in range(-8, -2))
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
    """A row for each form, rate, code and seed. Raises MissingModelError."""
    model, tokenizer = load_named(name)
    model.requires_grad_(False)
    tokens = hold_out(windows(read_texts(tokenizer, settings.texts), _TOKENS), 1)[1][:_HELD_OUT_WINDOWS]
    names = layer_weights(model)
    whole = {each: model.get_parameter(each).half() for each in names}
    subjects: dict[str, tuple[str, ...]] = {"weights": WEIGHT_FORMS, "kv": KV_FORMS}
    for subject, forms in subjects.items():
        for form in forms:
            fresh = _Subject(model, whole, tokens, form) if subject == "weights" else _Pages(model, whole, tokens, form)
            base, _ = fresh.loss(BitErrors(0.0, False, np.random.default_rng(0)))
            for rate, corrected, seed in ((r, c, s) for r in rates for c in (False, True) for s in seeds):
                errors = BitErrors(rate, corrected, np.random.default_rng(seed))
                loss, rejected = fresh.loss(errors)
                yield {
                    "subject": subject, "form": form, "bit_error_rate": rate, "corrected": corrected, "seed": seed,
                    "bits_flipped": errors.bits, "codewords_uncorrectable": errors.uncorrectable,
                    "tensors_rejected": rejected, "loss": loss,
                    "loss_increase": None if loss is None or base is None else loss - base,
                    "of": "nats a token; none where it is not finite, or where a tensor is rejected",
                }  # fmt: skip


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
        for name, weight in whole.items():
            model.get_parameter(name).copy_(weight)

    def loss(self, errors: BitErrors) -> tuple[float | None, int]:
        """Nats a token; no tensor is rejected."""
        found = _finite_loss(self._model, self._tokens, lambda: _ErrorCache(errors, self._form))
        return found, 0


class _ErrorCache(DynamicCache):
    """Keys and values as pages with errors give them back."""

    def __init__(self, errors: BitErrors, form: str) -> None:
        super().__init__()
        self._errors, self._form = errors, form

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See Cache.update."""
        states = [self._read_back(each) for each in (key_states, value_states)]
        held: tuple[Tensor, Tensor] = super().update(*states, *args, **kwargs)
        return held

    def _read_back(self, states: Tensor) -> Tensor:
        stored = (encode(states) if self._form == "int4" else states.half()).contiguous()
        self._errors.flip(stored.view(-1).view(torch.uint8).numpy())
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
    except OverflowError:
        return None
    return loss if math.isfinite(loss) else None
