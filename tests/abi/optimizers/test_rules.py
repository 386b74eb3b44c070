"""What every rule has: ranges, profiles, arrays and their sizes."""

import pytest

from nearflash.abi.errors import CommandError
from nearflash.abi.optimizers import OPTIMIZERS, AdagradStep, AdamStep, LionStep, Profile, SgdStep, StateFormat
from nearflash.abi.optimizers.state import TILE_PARAMS, dither_pattern

RULES = (AdamStep, SgdStep, AdagradStep, LionStep)


def test_the_rules_by_name() -> None:
    assert OPTIMIZERS == ("adam", "sgd", "adagrad", "lion")
    for rule in RULES:
        made = rule(lr=1e-3, step=1, profile="ieee", state_format="bf16")  # type: ignore[arg-type]
        assert made.profile is Profile.IEEE and made.state_format is StateFormat.BF16
        assert made == rule(lr=1e-3, step=1, state_format=StateFormat.BF16) != rule(lr=1e-3, step=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SgdStep(1e-3, 1, momentum=1.0), r"momentum must be in \[0, 1\), not 1.0"),
        (lambda: SgdStep(1e-3, 1, dampening=-0.1), r"dampening must be in \[0, 1\], not -0.1"),
        (
            lambda: SgdStep(1e-3, 1, nesterov=True),
            "nesterov must be False without momentum or with dampening, not True",
        ),
        (lambda: AdagradStep(1e-3, 1, lr_decay=-1), "lr_decay must be finite and at least 0, not -1"),
        (lambda: AdagradStep(1e-3, 0), "step must be at least 1, not 0"),
        (lambda: LionStep(1e-3, 1, beta2=1.0), r"beta2 must be in \[0, 1\), not 1.0"),
        (lambda: LionStep(-1.0, 1), "lr must be finite and at least 0, not -1.0"),
        (lambda: LionStep(1e-3, 1, profile=Profile.TORCH_FUSED), "profile must be ieee for LionStep, not torch_fused"),
        (
            lambda: SgdStep(1e-3, 1, profile=Profile.DEEPSPEED),
            "profile must be ieee or torch_fused for SgdStep, not deepspeed",
        ),
    ],
)
def test_values_out_of_range_are_named(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CommandError, match=message):
        make()


def test_the_first_step_of_momentum_takes_the_gradient_as_it_is() -> None:
    first, second = (SgdStep(0.1, step, momentum=0.5, dampening=0.25) for step in (1, 2))
    assert (first.gain, str(first.retained)) == (1.0, "-0.0")
    assert (second.gain, second.retained) == (0.75, 0.5)


def test_arrays_have_torchs_names_and_sizes() -> None:
    assert SgdStep(0.1, 1).arrays == () and SgdStep(0.1, 1, momentum=0.9).torch_names == {"m": "momentum_buffer"}
    assert AdagradStep(0.1, 1).torch_names == {"v": "sum"} and LionStep(0.1, 1).torch_names == {"m": "exp_avg"}
    adam = AdamStep(0.1, 1, state_format=StateFormat.MX8)
    assert adam.arrays == ("m", "m_scale", "v", "v_scale")
    sizes = {f: [f.array_bytes(name, 64) for name in ("p", "m", "m_scale")] for f in StateFormat}
    assert sizes == {StateFormat.FP32: [256, 256, 2], StateFormat.BF16: [256, 128, 2], StateFormat.MX8: [256, 64, 2]}


def test_the_dithers_pattern_is_equally_spaced() -> None:
    assert len({dither_pattern(place) >> 3 for place in range(TILE_PARAMS)}) == TILE_PARAMS
