"""Runs datapaths of the selection, cycle by cycle."""

from collections.abc import Callable
from typing import Any

import pytest
from amaranth.sim import Simulator


@pytest.fixture
def clocked() -> Callable[[Any, list[dict[str, Any]], list[str]], list[list[Any]]]:
    """Sets inputs in each cycle and gives the outputs named, as they are in that cycle before its edge."""

    def run(component: Any, rows: list[dict[str, Any]], outputs: list[str]) -> list[list[Any]]:
        seen: list[list[Any]] = []

        async def testbench(ctx: Any) -> None:
            for row in rows:
                for name, value in row.items():
                    ctx.set(getattr(component, name), value)
                seen.append([ctx.get(getattr(component, name)) for name in outputs])
                await ctx.tick()

        simulator = Simulator(component)
        simulator.add_clock(1e-6)
        simulator.add_testbench(testbench)
        simulator.run()
        return seen

    return run
