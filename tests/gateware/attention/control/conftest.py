"""Simulations whose inputs depend on outputs: queues of items and functions; a scan whose blocks come to their ends."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from amaranth.hdl import Array, Cat, Module, Signal
from amaranth.lib import wiring
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


class Credited(wiring.Component):
    """What sends index requests, with room for them all, and a credit `delay` cycles after a block's last one."""

    def __init__(self, component: Any, delay: int, channels: int) -> None:
        self.component, self.delay, self.channels = component, delay, channels
        members = component.signature.members.items()
        super().__init__({name: member for name, member in members if member.is_signature})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.inner = inner = self.component
        for name, member in self.signature.members.items():
            outer = getattr(self, name)
            if member.flow is wiring.In:
                wiring.connect(m, wiring.flipped(outer), getattr(inner, name))
            else:
                wiring.connect(m, getattr(inner, name), wiring.flipped(outer))
        item, moves = self.o.payload, self.o.valid & self.o.ready
        sent = Array(Signal(9, name=f"sent_{channel}") for channel in range(self.channels))
        ends = moves & (sent[item.channel] + 1 == item.request.expected)
        with m.If(moves):
            m.d.sync += sent[item.channel].eq(sent[item.channel] + 1)
        with m.If(ends):
            m.d.sync += sent[item.channel].eq(0)
        credit = Cat(item.channel, item.request.context, ends)
        for _ in range(self.delay):
            later = Signal.like(credit)
            m.d.sync += later.eq(credit)
            credit = later
        m.d.comb += [inner.room.eq(-1), inner.credit.eq(credit[:-1]), inner.credit_valid.eq(credit[-1])]
        return m


@pytest.fixture
def credited() -> type[Credited]:
    """The class."""
    return Credited
