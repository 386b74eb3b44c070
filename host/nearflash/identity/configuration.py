"""The digest of a transformers configuration: everything in it, but for the few keys that decide no result."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig

from nearflash.identity.plain import OPAQUE, digest_of, plain

__all__ = ["BOOKKEEPING", "configuration_digest"]

BOOKKEEPING = {
    "_name_or_path": "where it was read",
    "name_or_path": "where it was read",
    "_model_name_or_path": "where it was read",
    "_commit_hash": "where it was read",
    "transformers_version": "who wrote it",
    "architectures": "the model's class, which is compared itself",
    "dtype": "of the tensors, which are compared themselves",
    "torch_dtype": "an older spelling of dtype",
    "use_cache": "how it is computed",
    "chunk_size_feed_forward": "how it is computed",
    "gradient_checkpointing": "how gradients are computed",
    "initializer_range": "how new weights are drawn",
    "bos_token_id": "a setting of generation",
    "eos_token_id": "a setting of generation",
    "return_dict": "the form of what is returned",
    "output_attentions": "the form of what is returned",
    "output_hidden_states": "the form of what is returned",
    "id2label": "names of classes, of which a language model has none",
    "label2id": "names of classes, of which a language model has none",
    "problem_type": "a loss in training",
    "task_specific_params": "settings of generation",
}
"""Keys that are left out, and why; every other one, known or not, decides."""


def configuration_digest(config: PreTrainedConfig, without: Collection[str] = ()) -> str:
    """SHA-256, hexadecimal, of all keys of a configuration and those inside it but BOOKKEEPING and `without`.

    A key that has its class's default counts as one that is not there: a newer transformers has more of them.
    """
    return digest_of(_collect_keys(config, frozenset(BOOKKEEPING) | frozenset(without)))


def _collect_keys(config: PreTrainedConfig, left_out: frozenset[str]) -> dict[str, Any]:
    defaults = type(config).default_config_fields()
    deciding: dict[str, Any] = {"model_type": config.model_type}
    for key, value in config.to_dict().items():
        if key in left_out:
            continue
        inner = vars(config).get(key)
        if isinstance(inner, PreTrainedConfig):
            deciding[key] = _collect_keys(inner, left_out)
            continue
        plain_value = plain(value)
        if plain_value != plain(defaults.get(key)):
            deciding[key] = str(value) if plain_value is OPAQUE else plain_value
    return deciding
