"""A simulation whose inputs depend on its outputs: queues of items for each input, a function for each output."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from amaranth.sim import Simulator


class Reactive:
    """Runs a component until `done()`; `feed[name]` are items to send, `on[name]` is called with items received."""

    def __init__(self, component: Any, seed: int = 0, percent: int = 70) -> None:
        self.component, self.rng, self.percent = component, random.Random(seed), percent
        self.feed: dict[str, deque[Any]] = {}
        self.on: dict[str, Callable[[Any], None]] = {}
        self.hold: dict[str, Any] = {}
        self.cycle = 0

    def _port(self, name: str) -> Any:
        port = self.component
        for part in name.split("__"):
            port = port[int(part)] if part.isdigit() else getattr(port, part)
        return port

    def run(self, done: Callable[[], bool], limit_cycles: int = 20_000) -> None:
        """Raises AssertionError when it is not done by then."""
        inputs = {name: self._port(name) for name in self.feed}
        outputs = {name: self._port(name) for name in self.on}

        async def bench(ctx: Any) -> None:
            sent = dict.fromkeys(inputs, False)
            while not done():
                assert self.cycle < limit_cycles, f"not done after {limit_cycles} cycles"
                for name, value in self.hold.items():
                    ctx.set(getattr(self.component, name), value)
                for name, port in inputs.items():
                    if not sent[name] and self.feed[name] and self.rng.randrange(100) < self.percent:
                        ctx.set(port.payload, self.feed[name][0])
                        sent[name] = True
                    ctx.set(port.valid, sent[name])
                for port in outputs.values():
                    ctx.set(port.ready, self.rng.randrange(100) < self.percent)
                watched = [part for port in outputs.values() for part in (port.valid, port.ready, port.payload)]
                taken = [port.ready for port in inputs.values()]
                _, _, *values = await ctx.tick().sample(*taken, *watched)
                self.cycle += 1
                for name, ready in zip(inputs, values, strict=False):
                    if sent[name] and ready:
                        self.feed[name].popleft()
                        sent[name] = False
                for place, name in enumerate(outputs):
                    valid, ready, payload = values[len(inputs) + 3 * place :][:3]
                    if valid and ready:
                        self.on[name](payload)

        simulator = Simulator(self.component)
        simulator.add_clock(1e-6)
        simulator.add_testbench(bench)
        simulator.run()


@pytest.fixture
def reactive() -> type[Reactive]:
    """The class."""
    return Reactive
