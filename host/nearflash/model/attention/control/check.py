"""Descriptors as they lie in memory, and the rules that they must keep (docs/contracts/attention.md, 3)."""

from collections.abc import Mapping

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import DESCRIPTOR_FIELDS, AttendDescriptor, Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.formats import fp32_value
from nearflash.abi.kernel.config import AttendConfig
from nearflash.model.attention.numerics.logit import SCALE_LEAST, SCALE_LIMIT

__all__ = ["read_descriptor"]

_ADDRESSES = ("q_address", "v_mean_address", "out_address", "index_table_address", "token_table_address")
_KEPT = (
    "dim",
    "tokens",
    "group",
    "score_dims",
    "top_k",
    "local_window",
    "group_tokens",
    "block_tokens",
    "top_p",
    *_ADDRESSES,
)
_REFERENCES = tuple(f"reference_{head}" for head in range(8))


def read_descriptor(record: bytes, config: AttendConfig, contexts: int) -> AttendDescriptor | None:
    """The descriptor in a record of 128 bytes; None where it breaks a rule of a build with `contexts` in use."""
    values = {
        name: int.from_bytes(record[start : start + size], "little", signed=name in _REFERENCES)
        for name, (start, size) in DESCRIPTOR_FIELDS.items()
    }
    if not all(_rules(values, config)):
        return None
    mode = Mode(values["mode"])
    descriptor = AttendDescriptor(
        mode=mode,
        page_tag=PageTag(values["sequence"], values["layer"], values["head"]),
        interleaved=bool(values["interleaved"]),
        index_format=IndexFormat(min(values["index_format"], IndexFormat.INT4)),  # dense heads have none
        page_bytes=1 << values["page_log2"],
        scale=fp32_value(values["scale"]),
        reference=tuple(values[name] for name in _REFERENCES[: values["group"]]) if mode & Mode.REFERENCE else (),
        **{name: values[name] for name in _KEPT},
    )
    return descriptor if descriptor.fits(config, contexts) else None


def _rules(one: Mapping[str, int], config: AttendConfig) -> list[bool]:
    dense, fixed = bool(one["mode"] & Mode.DENSE), bool(one["mode"] & Mode.REFERENCE)
    n, block = one["group_tokens"], one["block_tokens"]
    row_bytes = one["dim"] * (4 if one["interleaved"] else 2)
    return [
        one["mode"] < 1 << len(Mode),
        1 <= one["group"] <= 8,
        one["dim"] % 4 == 0 and 4 <= one["dim"] <= 256,
        1 <= one["tokens"] <= 1 << 17,
        n % 4 == 0 and 4 <= n <= 64 and n * row_bytes <= 1 << one["page_log2"],
        one["interleaved"] <= 1,
        4096 <= 1 << one["page_log2"] <= config.page_bytes,
        SCALE_LEAST <= fp32_value(one["scale"]) < SCALE_LIMIT,
        all(one[name] % 8 == 0 and one[name] < 1 << 48 for name in _ADDRESSES),
        not fixed or all(-(1 << 11) <= one[name] < 1 << 11 for name in _REFERENCES),
        not dense or fixed,
        dense or 1 <= one["score_dims"] <= one["dim"],
        dense or 1 <= one["top_k"] <= one["tokens"],
        dense or (block % 16 == 0 and 16 <= block <= 1024 and n > 0 and block % n == 0),
        dense or one["index_format"] <= IndexFormat.INT4,
        one["top_p"] == 0 or bool(one["mode"] & Mode.PROBABILITY),
    ]
