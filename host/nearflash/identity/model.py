"""The identity of a model with its tokenizer: digests of all that decides what it computes.

    before = ModelIdentity.of(model, tokenizer)
    changed = before.differing(ModelIdentity.of(model, tokenizer))  # names of parts: none, if nothing was edited

Two models with one identity compute the same, up to rounding. What is left out is in `BOOKKEEPING` of
`nearflash.identity.configuration` and in lists of attributes beside it, each with its reason. Not seen: functions of
other modules that user's code calls, and library functions that were replaced outside their classes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor

from nearflash.identity.configuration import configuration_digest
from nearflash.identity.modules import adapter_states, find_unused_adapters, is_recomputed, module_states
from nearflash.identity.plain import digest_of
from nearflash.identity.tensors import find_tensors, tensor_digests
from nearflash.identity.tokenizer import tokenizer_digest

__all__ = ["ModelIdentity", "weights_digests"]


@dataclass(frozen=True)
class ModelIdentity:
    """Digests, hexadecimal, of the parts of a model and its tokenizer."""

    configuration: str
    dtype: str
    """What the model computes in, by name."""
    weights: str
    """All bytes of all parameters and buffers, by name, but those of adapters that are not in use."""
    modules: str
    """Classes, settings and own functions of its modules."""
    adapters: str
    tokenizer: str

    @classmethod
    def of(
        cls, model: Any, tokenizer: Any = None, *, stored: Mapping[str, str] = MappingProxyType({}), quick: bool = False
    ) -> Self:
        """The identity of a model as it is now, and of its tokenizer, None where there is none.

        stored: digests of what weights are read from, by name, which stand for them. Weights without memory are read
        from where a hook of accelerate's has them. quick: weights by CRC32C, to be compared within one process.
        Raises UnsupportedError for weights without memory or source, or of a kind whose bytes cannot be read.
        """

        return cls(
            configuration_digest(model.config), str(model.dtype).removeprefix("torch."),
            digest_of(tensor_digests(_tensors(model), partial(_find_hooked, model), stored=stored, quick=quick)),
            digest_of(module_states(model)),
            digest_of(adapter_states(model)), "" if tokenizer is None else tokenizer_digest(tokenizer),
        )  # fmt: skip

    @property
    def parts(self) -> dict[str, str]:
        """Its digests by name."""
        return asdict(self)

    def differing(self, other: "ModelIdentity") -> str:
        """The parts that are another model's, joined by commas; empty where none is."""
        return ", ".join(name for name, digest in self.parts.items() if other.parts[name] != digest)


def weights_digests(model: Any, dtypes: tuple[torch.dtype, ...]) -> dict[str, str]:
    """Digest of a model's tensors and adapters in each of these dtypes, by its name: of the model loaded in it.

    Tensors that a model keeps in another floating-point dtype are taken as converted, too. Raises as
    `ModelIdentity.of` does.
    """

    adapters = adapter_states(model)
    return {
        str(dtype).removeprefix("torch."): digest_of(
            [tensor_digests(_tensors(model), partial(_find_hooked, model), dtype=dtype), adapters]
        )
        for dtype in dtypes
    }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    unused = tuple(find_unused_adapters(model))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, tensor in find_tensors(model):
        module, _, leaf = name.rpartition(".")
        if f"{name}.".startswith(unused) or (module in modules and is_recomputed(modules[module], leaf)):
            continue
        yield name, tensor


def _find_hooked(model: torch.nn.Module, name: str) -> Tensor | None:
    """A tensor that a hook of accelerate's gives its module, or one above it, when that runs; None where none does."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        try:
            module = model.get_submodule(".".join(parts[:depth]))
        except AttributeError:
            continue
        hook = getattr(module, "_hf_hook", None)
        for inner_hook in getattr(hook, "hooks", (hook,)):
            weights = getattr(inner_hook, "weights_map", None)
            if weights is None:
                continue
            try:
                return weights[".".join(parts[depth:])]
            except KeyError:
                continue
    return None
