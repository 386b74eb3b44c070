"""What the user of `nearflash generate` reads after a run, and before it."""

import sys

import pytest

from nearflash.inference.commands.console import estimate, summary
from nearflash.inference.engines.base import EngineCounters
from nearflash.inference.generate import Generated
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.kv import KvShape
from nearflash.weights import pretrained

SHAPE = KvShape(layers=10, kv_heads=2, dim=64)


def generated(flash_bytes):
    counters = EngineCounters(40, flash_bytes, {"append": 0.25, "attend": 1.5})
    return Generated(["a b", "c d"], [[1, 2, 3], [4, 5, 6]], 2.0, 4.0, counters)


def test_a_summary_has_rates_phases_and_bytes_by_kind():
    rates, flash = summary(generated({"token": 6_000_000, "index": 2_000_000})).splitlines()
    assert rates.startswith("6 tokens: prefill 2.0 s, decode 4.0 s, 1.0 tokens/s; engine: append 0.2 s, attend 1.5 s")
    assert flash == "2.000 MB of flash a token, in all token 6.00 MB, index 2.00 MB"


def test_a_summary_says_where_no_flash_was_read():
    assert summary(generated({})).endswith("were in memory: no flash was read")


@pytest.mark.parametrize(
    ("policy", "factor"), [(AttentionPolicy(), 1.0), (AttentionPolicy(AttentionMode.SPARF_PAGE), 1.125)]
)
def test_an_estimate_has_the_bytes_that_will_be_written(tmp_path, policy, factor):
    (line,) = list(estimate(SHAPE, policy, 1000, 2, [tmp_path / "kv"]))
    size = 1000 * 2 * SHAPE.token_bytes * factor / 1e6
    assert f"up to {size:.1f} MB are written to {tmp_path / 'kv'} (" in line and "GB are free there" in line


@pytest.mark.parametrize("verbose", [False, True])
def test_loading_is_silent_unless_asked(monkeypatch, capsys, doclm_folder, verbose):
    """transformers' reader of GGUF files draws bars, whatever its settings are."""
    real = pretrained.AutoModelForCausalLM.from_pretrained

    def noisy(*args, **options):
        print("converting: 50 %", file=sys.stderr)
        return real(*args, **options)

    monkeypatch.setattr(pretrained.AutoModelForCausalLM, "from_pretrained", noisy)
    pretrained.load_pretrained(doclm_folder, verbose=verbose)
    assert ("converting" in capsys.readouterr().err) == verbose
