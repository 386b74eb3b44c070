"""The lane equals the reference model to the bit, in every profile, on ordinary and on extreme values."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from numpy.typing import NDArray

from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, OptimizerStep, Profile, SgdStep
from nearflash.abi.registers import UPDATE
from nearflash.gateware.update.lane import PROGRAM, Lane, LaneInput, LaneOutput
from nearflash.gateware.update.scalars import SCALARS, UpdateScalars
from nearflash.model.update.lane import optimizer_step
from nearflash.sim.verilator.burst import BurstUnit


class LaneUnderTest(wiring.Component):
    """A lane with its scalars as register words."""

    def __init__(self) -> None:
        self._lane = Lane()
        self.LATENCY = self._lane.LATENCY
        words = {name: In(UPDATE[name].width_bits) for name in (*SCALARS, "denominator_factor")}
        super().__init__({"i": In(LaneInput), "program": In(PROGRAM), "o": Out(LaneOutput), **words})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.lane = lane = self._lane
        m.submodules.scalars = scalars = UpdateScalars()
        for name in (*SCALARS, "denominator_factor"):
            m.d.comb += getattr(scalars.i, name).eq(getattr(self, name))
        m.d.comb += [
            lane.i.eq(self.i),
            lane.program.eq(self.program),
            lane.scalars.eq(scalars.o),
            self.o.eq(lane.o),
        ]
        return m


@pytest.fixture(scope="module")
def unit() -> BurstUnit:
    return BurstUnit(LaneUnderTest(), "lane")


def _run(unit: BurstUnit, rule: OptimizerStep, copy: CopyFormat, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    values = UpdateCommand(rule, 1, {}, {}, copy).registers()
    static = {name: np.asarray(values[name], np.uint64) for name in (*SCALARS, "denominator_factor", "program")}
    return unit.run({"i": words, **static})["o"]


def _check(unit: BurstUnit, rule: OptimizerStep, copy: CopyFormat, words: NDArray[np.uint32]) -> None:
    words = words.copy()
    words[:, [k for k, role in ((2, "m"), (3, "v")) if role not in rule.torch_names]] = 0
    got = _run(unit, rule, copy, words)
    g, p, m, v = (np.ascontiguousarray(words[:, k]).view(np.float32) for k in range(4))
    want = optimizer_step(rule, g, p, m, v, copy)
    for name, array in want.state.items():
        k = "pmv".index(name)
        wrong = np.flatnonzero(got[:, k] != array.view(np.uint32))
        assert wrong.size == 0, f"{name}: {wrong.size} of {len(g)} words differ, first for {words[wrong[0]]}"
    assert np.array_equal(got[:, 3] & 0xFFFF, want.copy if want.copy is not None else got[:, 3] & 0xFFFF)
    assert int((got[:, 3] >> 16 & 1).sum()) == want.nonfinite_gradients
    if copy:
        assert int((got[:, 3] >> 17 & 1).sum()) == want.copy_overflows


def _ordinary(count: int, seed: int) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-30, 4, (count, 4))).astype(np.float32)
    values = rng.standard_normal((count, 4)).astype(np.float32) * scale
    values[:, 3] = values[:, 3] ** 2
    return values.view(np.uint32)


def _extreme(count: int, seed: int) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    exponent = rng.choice([0, 0, 1, 2, 64, 100, 126, 127, 128, 190, 253, 254, 255], (count, 4))
    mantissa = rng.choice([0, 1, 0x7FFFFF, 0x400000, 0x3FFFFF, 0x555555], (count, 4)) ^ rng.choice(
        [0, 0, 0x123], (count, 4)
    )
    sign = rng.integers(0, 2, (count, 4))
    return (sign << 31 | exponent << 23 | mantissa).astype(np.uint32)


STEPS = [
    dict(lr=1e-3, step=1),
    dict(lr=1e-3, step=7, weight_decay=0.01),
    dict(lr=3e-4, step=1000, beta2=0.95, eps=1e-6, weight_decay=0.1),
    dict(lr=1e-3, step=3, weight_decay=0.01, decoupled=False),
    dict(lr=0.0, step=2, eps=0.0),
]


@pytest.mark.parametrize("profile", list(Profile))
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_model(unit: BurstUnit, profile: Profile, step: dict[str, float]) -> None:
    for copy, words in zip(CopyFormat, (_ordinary(20_000, 1), _extreme(20_000, 2), _ordinary(20_000, 3)), strict=True):
        _check(unit, AdamStep(**step, profile=profile), copy, words)


OTHERS = [
    *(rule(profile=profile, **scalars) for profile in (Profile.IEEE, Profile.TORCH_FUSED) for rule, scalars in (
        (SgdStep, dict(lr=0.1, step=1)),
        (SgdStep, dict(lr=0.1, step=5, weight_decay=0.01)),
        (SgdStep, dict(lr=0.1, step=1, momentum=0.9, dampening=0.5)),
        (SgdStep, dict(lr=0.1, step=2, momentum=0.9, dampening=0.5, weight_decay=0.1)),
        (SgdStep, dict(lr=0.1, step=2, momentum=0.9, nesterov=True, weight_decay=0.1)),
        (AdagradStep, dict(lr=0.1, step=1, eps=0.0)),
        (AdagradStep, dict(lr=0.1, step=7, lr_decay=0.1, weight_decay=0.1)))),
    LionStep(1e-3, 1), LionStep(1e-3, 5, weight_decay=0.1), LionStep(1e-3, 5, beta1=0.0, beta2=0.0),
]  # fmt: skip


@pytest.mark.parametrize("rule", OTHERS, ids=str)
def test_other_rules_equal_the_model(unit: BurstUnit, rule: OptimizerStep) -> None:
    for copy, words in ((CopyFormat.BF16, _ordinary(20_000, 6)), (CopyFormat.NONE, _extreme(20_000, 7))):
        _check(unit, rule, copy, words)


@pytest.mark.full
@pytest.mark.parametrize("profile", list(Profile))
def test_equals_the_model_on_millions_of_parameters(unit: BurstUnit, profile: Profile) -> None:
    rng = np.random.default_rng(4)
    for step in range(1, 6):
        adam = AdamStep(lr=1e-3, step=step**3, weight_decay=0.01, profile=profile)
        words = rng.integers(0, 1 << 32, (1_000_000, 4), np.uint32)
        _check(unit, adam, CopyFormat(step % 3), words)


def test_latency_is_as_stated(unit: BurstUnit) -> None:
    adam = AdamStep(lr=1e-3, step=1)
    words = np.repeat(_ordinary(2, 5), [300, 300], axis=0)
    values = UpdateCommand(adam, 1, {}, {}).registers()
    static = {name: np.asarray(values[name], np.uint64) for name in (*SCALARS, "denominator_factor", "program")}
    trace = unit._run({"i": words, **static}, 0)["o"]
    first = int((trace[300:] != trace[299]).any(axis=1).argmax())
    assert first == unit.stated_latency
