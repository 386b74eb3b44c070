"""What a policy reads, and how long that takes a drive: by hand, and the choice that follows from it."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from nearflash.abi.attention.pages import IndexFormat
from nearflash.inference.calibration import choose
from nearflash.inference.calibration.choose import UNIFORM, choose_policy
from nearflash.inference.policy.estimate import index_bytes, read_fraction, read_seconds
from nearflash.inference.policy.files import PolicyFile
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.inference.setup import default_layout
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import DriveProfile
from nearflash.storage.kv import KvLayout, KvShape

SHAPE = KvShape(layers=4, kv_heads=2, dim=64)
LAYOUT = KvLayout(16, True, 1024, IndexFormat.INT4, 4096)
CONFIG = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=99)
EIGHTH = AttentionPolicy(AttentionMode.SPARF_PAGE, score_dims=16, top_k=1 / 8, local_window=16)
TOKENS = 32768


def profile(**rates):
    """GB/s: `read` of 4 MiB, `r4`, `r16`, `r64` of KiB at random places."""
    sizes = {"read": 4 << 20, "r4": 4 << 10, "r16": 16 << 10, "r64": 64 << 10}
    return DriveProfile("now", tuple(
        Rate("read" if name == "read" else "random", sizes[name], 128, rate, rate, rate) for name, rate in rates.items()
    ))  # fmt: skip


def test_fractions_of_what_policies_read():
    assert read_fraction(AttentionPolicy(), SHAPE, LAYOUT, TOKENS) == 1
    assert read_fraction(EIGHTH, SHAPE, LAYOUT, TOKENS) == 1 / 8
    single = AttentionPolicy(AttentionMode.SPARF, score_dims=16, top_k=1 / 16, local_window=16)
    assert read_fraction(single, SHAPE, LAYOUT, TOKENS) == pytest.approx(1 - (15 / 16) ** 16)
    swapped = AttentionPolicy("kvswap", score_dims=8, top_k=1 / 8, local_window=16)
    assert read_fraction(swapped, SHAPE, LAYOUT, TOKENS) == (1 + 3 / 8) / 4  # the first of four layers reads all
    mixed = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=1 / 8, local_window=16, overrides={1: AttentionPolicy()})
    assert read_fraction(mixed, SHAPE, LAYOUT, TOKENS) == pytest.approx((3 / 8 + 1) / 4)


def test_seconds_are_by_the_kind_of_request():
    drive = profile(read=4.0, r4=0.5, r64=2.0)
    assert (
        read_seconds(8e9, drive) == 2 and read_seconds(8e9, drive, 4096) == 16 and read_seconds(8e9, drive, 65536) == 4
    )
    # int4 rows of 64 dims: eight to a page of 4 KiB.
    assert index_bytes(SHAPE, LAYOUT, TOKENS) == 32 * 8 * 4096 * 4 * 2


@pytest.mark.parametrize(
    ("rates", "page_bytes", "tokens"),
    [
        ({"read": 3.0, "r4": 2.0, "r64": 3.0}, 4096, TOKENS),
        ({"read": 3.0, "r4": 0.3, "r16": 1.5, "r64": 2.0}, 16384, TOKENS),
        ({"read": 3.0, "r4": 0.3, "r16": 0.8, "r64": 2.0}, 65536, TOKENS),
        ({"read": 3.0, "r4": 0.1, "r16": 0.1, "r64": 0.1}, 65536, TOKENS),
        ({"read": 3.0, "r4": 0.3, "r16": 0.8, "r64": 2.0}, 16384, 4096),  # 64 groups at least
        ({"read": 3.0, "r4": 0.3, "r16": 0.8, "r64": 2.0}, 4096, 1000),
    ],
)
def test_pages_are_the_smallest_that_the_drive_reads_well(rates, page_bytes, tokens):
    layout = default_layout(64, EIGHTH, tokens, profile(**rates))
    assert layout.page_bytes == page_bytes and layout.group_tokens == page_bytes // 256
    assert layout.block_tokens % layout.group_tokens == 0
    single = AttentionPolicy(AttentionMode.SPARF)
    assert default_layout(64, single, tokens, profile(**rates)).page_bytes == 4096


def calibrated(monkeypatch, fraction):
    policy = AttentionPolicy(
        AttentionMode.SPARF_PAGE, overrides={(layer, head): EIGHTH for layer in range(4) for head in range(2)}
    )
    file = PolicyFile("mine", "0" * 16, policy, LAYOUT, fraction, 0.01, "by hand")
    monkeypatch.setattr(choose, "find_policy", lambda digest, shape, fits=None: (Path("mine.json"), file))
    return policy


def test_a_drive_that_reads_pages_well_changes_nothing(monkeypatch):
    fast = profile(read=3.0, r4=2.5, r64=3.0)
    assert choose_policy(CONFIG, SHAPE, TOKENS, profile=fast)[0] == UNIFORM
    own = calibrated(monkeypatch, 0.13)
    policy, layout, sentence = choose_policy(CONFIG, SHAPE, TOKENS, profile=fast)
    assert policy == own and layout == LAYOUT and sentence == "policy: mine.json, calibrated for mine"


def test_a_calibration_for_pages_that_are_read_slowly_gives_way_to_larger_ones(monkeypatch):
    calibrated(monkeypatch, 0.13)
    slow = profile(read=3.0, r4=0.2, r16=0.8, r64=2.0)
    policy, layout, sentence = choose_policy(CONFIG, SHAPE, TOKENS, profile=slow)
    assert policy == UNIFORM and layout is None
    assert sentence.startswith("policy: uniform sparf-page, as it would take 0.")
    assert ", read in pages of 64 KiB, and mine.json 0." in sentence and sentence.endswith("pages of 4 KiB")


def test_a_calibration_whose_pages_are_faster_than_all_gives_way_to_what_is_much_faster(monkeypatch):
    """It was kept as soon as it was faster than reading everything: 7.7 in place of 12.3 tokens a second."""
    own = calibrated(monkeypatch, 0.13)
    assert choose_policy(CONFIG, SHAPE, TOKENS, profile=profile(read=3.0, r4=0.5, r64=2.7))[0] == UNIFORM
    assert choose_policy(CONFIG, SHAPE, TOKENS, profile=profile(read=3.0, r4=1.3, r64=2.7))[0] == own
    assert choose_policy(CONFIG, SHAPE, TOKENS, profile=profile(read=3.0, r4=1.0, r64=2.7), stored=LAYOUT)[0] == own


def test_what_is_slower_than_reading_everything_is_not_chosen():
    bad = profile(read=3.0, r4=0.1, r16=0.3, r64=0.5)
    policy, layout, sentence = choose_policy(CONFIG, SHAPE, TOKENS, profile=bad)
    assert policy == AttentionPolicy() and layout is None
    assert sentence.startswith("policy: dense, as what is chosen would take") and "pages of 64 KiB" in sentence
    assert choose_policy(CONFIG, SHAPE, TOKENS, profile=bad, stored=LAYOUT)[1] == LAYOUT


def test_memory_that_keeps_what_is_chosen_counts():
    """What is chosen is chosen again: then the drive hardly matters. For all K and V the memory is too small."""
    bad = profile(read=3.0, r4=0.1, r16=0.3, r64=0.5)
    kv_bytes = TOKENS * SHAPE.token_bytes
    assert choose_policy(CONFIG, SHAPE, TOKENS, profile=bad, cache_bytes=kv_bytes * 7 // 8)[0] == UNIFORM
    assert (
        choose_policy(CONFIG, SHAPE, TOKENS, profile=bad, cache_bytes=kv_bytes * 7 // 8, sequences=8)[0].mode == "dense"
    )
