"""Digests of all that decides a model's results: sessions, results and policies compare it."""

from nearflash.identity.configuration import configuration_digest
from nearflash.identity.files import file_digest
from nearflash.identity.model import ModelIdentity, weights_digests
from nearflash.identity.tokenizer import tokenizer_digest

__all__ = ["ModelIdentity", "configuration_digest", "file_digest", "tokenizer_digest", "weights_digests"]
