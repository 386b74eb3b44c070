"""Ends of AXI ports for tests on Amaranth's simulator."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from amaranth.hdl import Module
from amaranth.lib.wiring import connect
from amaranth.sim import Simulator


@dataclass
class Channel:
    """One AXI channel: sends what is put into `items`, or receives into it; pauses at random in `stall_percent`."""

    bus: Any
    prefix: str
    members: tuple[str, ...]
    stall_percent: int = 0
    items: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.prefix} {self.stall_percent}")

    def signal(self, name: str) -> Any:
        return getattr(self.bus, self.prefix + name)

    async def send(self, ctx: Any) -> None:
        """As a process: every item that is put into `items`, in order; valid stays until ready."""
        while True:
            while not self.items or self.rng.randrange(100) < self.stall_percent:
                await ctx.tick()
            for name, value in zip(self.members, self.items[0], strict=True):
                ctx.set(self.signal(name), value)
            ctx.set(self.signal("valid"), 1)
            ready = False
            while not ready:
                _, _, ready = await ctx.tick().sample(self.signal("ready"))
            ctx.set(self.signal("valid"), 0)
            self.items.pop(0)

    async def receive(self, ctx: Any) -> None:
        """As a process: what comes is appended to `items` as tuples of `members`."""
        waiting: tuple[Any, ...] | None = None
        while True:
            ready = self.rng.randrange(100) >= self.stall_percent
            ctx.set(self.signal("ready"), ready)
            _, _, valid, *values = await ctx.tick().sample(self.signal("valid"), *map(self.signal, self.members))
            now = tuple(map(int, values)) if valid else None
            assert waiting is None or now == waiting, f"{self.prefix} must hold its payload until ready"
            waiting = None if ready else now
            if valid and ready:
                self.items.append(now)


@pytest.fixture
def simulate() -> Callable[..., None]:
    """Run processes beside a component until the testbench ends."""

    def run(dut: Any, testbench: Any, *processes: Any) -> None:
        top = Module()
        top.submodules.dut = dut
        simulator = Simulator(top)
        simulator.add_clock(1e-6)
        ended = []

        async def main(ctx: Any) -> None:
            await testbench(ctx)
            ended.append(True)

        simulator.add_testbench(main)
        for process in processes:
            simulator.add_testbench(process, background=True)
        simulator.run()
        assert ended

    return run


@pytest.fixture
def channel() -> type[Channel]:
    """The kind of a channel's end."""
    return Channel


@pytest.fixture
def joined() -> Callable[..., Module]:
    """A module of several components, with pairs of their interfaces connected."""

    def make(components: Any, *pairs: Any) -> Module:
        m = Module()
        m.submodules += components
        for one, other in pairs:
            connect(m, one, other)
        return m

    return make
