"""Models that put a cache of their own in the place of the one they were given are stopped before they go on."""

from types import MethodType
from typing import Any

from nearflash.abi.errors import CommandError, UnsupportedError

__all__ = ["guarded", "replaced_cache"]


def guarded(model: Any) -> Any:
    """The model, whose generate raises UnsupportedError at the step at which it would leave a cache that keeps K and V
    itself (`keeps_kv`), and CommandError where nothing is left to compute behind what such a cache holds.
    """
    if hasattr(type(model), "prepare_inputs_for_generation"):
        model.prepare_inputs_for_generation = MethodType(prepare_inputs_for_generation, model)
    return model


def prepare_inputs_for_generation(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own inputs of a step, checked. Of the model's own name, so that copies and pickles find theirs."""
    inputs = type(self).prepare_inputs_for_generation(self, input_ids, *args, **kwargs)
    cache = kwargs.get("past_key_values")
    if not getattr(cache, "keeps_kv", False):
        return inputs
    if inputs.get("past_key_values") is not cache and not cache.get_seq_length():
        inputs["past_key_values"] = cache  # nothing is computed again
    if inputs.get("past_key_values") is not cache:
        raise replaced_cache(f"after {cache.get_seq_length()} tokens it computes all again, for another one in memory")
    if kwargs.get("use_cache") is False and cache.get_seq_length():
        raise CommandError("use_cache must be True with KV on flash: without it each step would store all tokens again")
    new = kwargs.get("next_sequence_length")
    if new is not None and new < 1:
        held = cache.get_seq_length()
        raise CommandError(
            f"input_ids must go on behind the {held} tokens that the cache holds: reset it for another text"
        )
    return inputs


def replaced_cache(why: str) -> UnsupportedError:
    """The error of a model that does not keep to its cache."""
    return UnsupportedError(
        f"model must keep to the cache that it is given, but {why}: stay below the length at which it changes its "
        "positions (original_max_position_embeddings), or generate with transformers' own cache"
    )
