"""Settings: what does not fit together is named; the descriptor says the same."""

import pytest

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import Mode
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError
from nearflash.model.attention.memory.settings import Addresses, HeadSettings

GOOD = dict(mode=Mode.PAGE | Mode.PROBABILITY, dim=128, scale=0.1, score_dims=16, top_k=9, local_window=5, top_p=60000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(dim=130), "dim must be a multiple of 4, 4 to 256, not 130"),
        (dict(scale=256.0), r"scale must be at least 2\^-14 and below 2\^8, not 256.0"),
        (dict(score_dims=129), "score_dims must be 1 to dim, not 129"),
        (dict(top_k=0), "top_k must be at least 1, not 0"),
        (dict(top_p=5, mode=Mode(0)), "top_p must be 0, or 1 to 65535 with PROBABILITY, not 5"),
        (dict(reference=(1,)), "reference must be given exactly with REFERENCE"),
        (dict(mode=Mode.DENSE, top_p=0), "mode must be with REFERENCE where DENSE"),
        (dict(group_tokens=12), "block_tokens must be a multiple of group_tokens, not 256"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    HeadSettings(**GOOD)
    with pytest.raises(CommandError, match=message):
        HeadSettings(**{**GOOD, **change})


def test_descriptor_has_every_field():
    kind = HeadSettings(**GOOD, group_tokens=8, interleaved=True, block_tokens=512, index_format=IndexFormat.INT4)
    made = kind.descriptor(PageTag(1, 2, 3), 1000, 4, Addresses(8, 16, 24, 32, 40))
    for name in ("mode", "dim", "scale", "score_dims", "top_k", "local_window", "top_p", "group_tokens", "interleaved",
                 "block_tokens", "index_format", "page_bytes", "reference"):  # fmt: skip
        assert getattr(made, name) == getattr(kind, name)
    assert (made.tokens, made.group, made.page_tag, made.q_address, made.token_table_address) == (
        1000, 4, PageTag(1, 2, 3), 8, 40,
    )  # fmt: skip
    assert len(made.pack()) == 128
    assert (kind.entry_tokens, kind.entries(1000), kind.count_scanned(1000)) == (8, 125, 512)
