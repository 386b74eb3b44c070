"""Seconds until the first token of a prompt, in flash dies that multiply."""

import pytest

from nearflash.explore.systems.ifc import Arrangement, Decode
from nearflash.explore.systems.prefill import prefill_step

C_16, BASE_1 = Arrangement("C", 16), Arrangement("Base-1")


def test_a_short_prompt_by_hand():
    """8 tokens of 6.5 billion weights beside 512 planes of 16 multipliers; 512 hidden states of 8 KB fit in 4.2 MB."""
    prompt = Decode("llama2-7b", 8)
    found = prefill_step(prompt, C_16)
    assert found.phases["weights"] == pytest.approx(8 * prompt.shape.active / (512 * 16 * 400e6))
    assert "beside the planes" in found.assumptions[-1]
    assert found.traffic_bytes["weights"] == prompt.weight_bytes


def test_a_long_prompt_is_multiplied_on_the_npu():
    """1,000 tokens take 16.4 MB of hidden states: four chunks, for each of which all weights cross 16 interfaces."""
    prompt = Decode("llama2-7b", 1000)
    found = prefill_step(prompt, C_16)
    assert found.phases["weights"] == pytest.approx(4 * prompt.weight_bytes / (16 * 4.8e9))
    assert "on the NPU" in found.assumptions[-1]
    assert found.traffic_bytes["weights"] == 4 * prompt.weight_bytes


def test_attention_grows_with_the_square():
    one, two = (prefill_step(Decode("llama3.1-8b", tokens), C_16).phases["attention"] for tokens in (20_000, 40_000))
    assert two == pytest.approx(4 * one)
    assert one == pytest.approx(2 * 32 * 4096 * 20_000**2 / 32e12)


@pytest.mark.parametrize("arrangement", [C_16, BASE_1, Arrangement("Base-2"), Arrangement("D", 8, 8)])
def test_longer_prompts_take_longer(arrangement):
    times = [prefill_step(Decode("llama2-7b", tokens), arrangement).seconds for tokens in (1, 100, 1000, 10_000)]
    assert times == sorted(times)


def test_pages_are_programmed_meanwhile():
    found = prefill_step(Decode("llama2-7b", 10_000), C_16)
    assert found.phases["KV write"] == 0
    assert found.hidden["KV write"] == pytest.approx(10_000 * 2 * 32 * 4096 * 2 / 4096 / 512 * 75e-6, rel=0.01)
    one_die = prefill_step(Decode("llama2-7b", 10_000), Arrangement("D", 15, 1))
    assert one_die.hidden["KV write"] + one_die.phases["KV write"] == pytest.approx(16 * found.hidden["KV write"])


def test_fits_as_a_step_does():
    assert not prefill_step(Decode("llama2-7b", 100_000), BASE_1).fits
    assert prefill_step(Decode("llama2-7b", 100_000), C_16).fits
