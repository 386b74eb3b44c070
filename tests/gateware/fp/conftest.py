"""What the tests of the floating point units share: the Verilated unit, Amaranth's simulator, and a comparison."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import ClockDomain, Module, Value
from amaranth.sim import Simulator

from nearflash.sim.verilator.burst import BurstUnit
from nearflash.verify.fixtures.fp32_unit import Fp32Unit


@pytest.fixture(scope="session")
def fp_unit():
    """The Verilated core, between Unpack and Pack."""

    def build(core: Any, **options: Any) -> BurstUnit:
        return BurstUnit(Fp32Unit(core, **options), f"fp_{type(core).__name__.lower()}")

    return build


@pytest.fixture(scope="session")
def same():
    """Assert that a unit's results and exceptions are the model's."""

    def check(unit: BurstUnit, inputs: Mapping[str, Any], expected: Sequence[Any]) -> None:
        got = unit.run(inputs)
        np.testing.assert_array_equal(got["o"], expected[0])
        np.testing.assert_array_equal(got["flags"], expected[1])

    return check


@pytest.fixture(scope="session")
def simulate():
    """Feed a component one row of `inputs` a cycle; the integers at its outputs, LATENCY cycles later."""

    def run(component: Any, inputs: Mapping[str, Sequence[int]], outputs: Sequence[str]) -> dict[str, list[int]]:
        m = Module()
        m.domains.sync = ClockDomain()
        m.submodules.dut = component
        rows = len(next(iter(inputs.values())))
        found: dict[str, list[int]] = {name: [] for name in outputs}

        async def testbench(context: Any) -> None:
            for cycle in range(rows + component.LATENCY):
                for name, values in inputs.items():
                    context.set(Value.cast(getattr(component, name)), int(values[min(cycle, rows - 1)]))
                await context.delay(1e-9)
                if cycle >= component.LATENCY:
                    for name in outputs:
                        found[name].append(context.get(Value.cast(getattr(component, name))))
                await context.tick()

        simulator = Simulator(m)
        simulator.add_clock(1e-6)
        simulator.add_testbench(testbench)
        simulator.run()
        return found

    return run
