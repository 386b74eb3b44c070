"""Models that put a cache of their own in the place of the one they were given are stopped before they go on."""

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

from nearflash.abi.errors import CommandError, UnsupportedError

__all__ = ["cache_error", "guard"]


def guard(model: Any) -> Any:
    """The model, whose generate raises UnsupportedError at the step at which it would leave a cache that keeps K and V
    itself (`keeps_kv`), and CommandError where it is to compute without that cache, or nothing behind what it holds.
    """
    prepare = getattr(type(model), "prepare_inputs_for_generation", None)
    if prepare is not None:
        model.prepare_inputs_for_generation = MethodType(_check_calls(prepare), model)
    return model


def _check_calls(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """The method with checks, of its signature, that transformers reads, and name, that copies and pickles need."""

    @wraps(prepare)
    def check_and_prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        if not getattr(cache, "keeps_kv", False):
            return prepare(self, input_ids, *args, **kwargs)
        if kwargs.get("use_cache") is False:
            raise CommandError("use_cache must be True with KV on flash: each step would store all tokens again")
        held, new = cache.get_seq_length(), kwargs.get("next_sequence_length")
        if new is not None and new < 1:
            raise CommandError(f"input_ids must go on behind the {held} tokens that the cache holds: reset it first")
        inputs = prepare(self, input_ids, *args, **kwargs)
        if inputs.get("past_key_values") is not cache and held:
            raise cache_error(f"after {held} tokens it computes all again, for another one in memory")
        inputs["past_key_values"] = cache
        _check_new_tokens(held, kwargs.get("attention_mask"), inputs)
        return inputs

    return check_and_prepare


def _check_new_tokens(held: int, mask: Any, inputs: Any) -> None:
    """Raise CommandError where tokens that the cache holds are passed again, as transformers' search for drafts does on
    a cache that holds some: its own caches give other tokens then."""
    ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
    if not held or ids is None or ids.shape[1] == 1:
        return
    total = None
    if mask is None and positions is not None:
        total = int(positions.max()) + 1
    elif getattr(mask, "ndim", 0) == 2:
        total = mask.shape[1]
    if total is not None and total < held + ids.shape[1]:
        raise CommandError(
            f"input_ids must go on behind the {held} tokens that the cache holds, but {ids.shape[1]} of {total} are "
            "passed: leave out prompt_lookup_num_tokens, or reset the cache first"
        )


def cache_error(why: str) -> UnsupportedError:
    """The error of a model that does not keep to its cache."""
    return UnsupportedError(
        f"model must keep to the cache that it is given, but {why}: stay below the length at which it changes its "
        "positions (original_max_position_embeddings), or generate with transformers' own cache"
    )
