"""What tests of several gateware packages share."""

from collections.abc import Callable
from typing import Any

import pytest
from amaranth.sim import Simulator


@pytest.fixture(scope="session")
def clocked() -> Callable[..., list[int]]:
    """Feeds a component without handshake a list of inputs a cycle: clocked(component, rows) -> `o` after each."""

    def run(component: Any, rows: list[dict[str, int]]) -> list[int]:
        found: list[int] = []
        simulator = Simulator(component)
        simulator.add_clock(1e-6)

        async def bench(ctx: Any) -> None:
            for row in rows + rows[-1:] * component.LATENCY:
                for name, value in row.items():
                    ctx.set(getattr(component, name), value)
                await ctx.tick()
                found.append(ctx.get(component.o))

        simulator.add_testbench(bench)
        simulator.run()
        return found[component.LATENCY - 1 : len(rows) + component.LATENCY - 1]

    return run
