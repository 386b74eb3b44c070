import pytest

from nearflash.abi.errors import FormatError, ShapeError
from nearflash.abi.topk import ValueFormat
from nearflash.training.gradients.compression import TopK
from nearflash.training.gradients.compression.topk import WARMUP_STEPS


def test_the_share_falls_during_warm_up():
    settings = TopK(0.01, warmup_steps=3)
    ratios = [settings.ratio_at(step) for step in (1, 2, 3, 4, 100)]
    assert ratios == pytest.approx([10**-0.5, 0.1, 10**-1.5, 0.01, 0.01])


def test_by_default_a_share_falls_for_a_hundred_steps_and_a_schedule_counts_as_it_is():
    settings = TopK(0.01)
    assert settings.ratio_at(1) > 0.95 and settings.ratio_at(100) > 0.01 == settings.ratio_at(WARMUP_STEPS + 1)
    assert 21 < sum(settings.ratio_at(step) for step in range(1, 101)) < 22  # steps' worth of all gradients
    assert TopK(lambda _: 0.01).ratio_at(1) == 0.01


def test_a_schedule_of_the_share():
    settings = TopK(lambda step: 1.0 if step < 3 else 0.5)
    assert [settings.count(10, step) for step in (1, 2, 3)] == [10, 10, 5]


def test_at_least_one_pair():
    assert TopK(0.001, warmup_steps=0).count(16, 1) == 1


def test_wire_formats():
    assert [TopK(value_format=name).wire_format for name in ("fp32", "fp16", "bf16")] == list(ValueFormat)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"ratio": 0.0}, ShapeError, r"ratio must be in \(0, 1\], not 0.0 at step 1"),
        ({"ratio": lambda step: 2.0}, ShapeError, r"ratio must be in \(0, 1\], not 2.0 at step 1"),
        ({"value_format": "int8"}, FormatError, "value_format must be 'fp16', 'bf16' or 'fp32', not 'int8'"),
        ({"residual": "int8"}, FormatError, "residual must be 'fp32' or 'int4', not 'int8'"),
        ({"warmup_steps": -1}, ShapeError, "warmup_steps must be at least 0, not -1"),
    ],
)
def test_messages(options, error, message):
    with pytest.raises(error, match=message):
        TopK(**options)
