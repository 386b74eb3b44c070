"""Runs a stream component on Amaranth's own simulator: no build, 10-30 thousand cycles a second.

Every stream of the component's signature gets a source or a sink. Streams are named as in the Verilog: the path of
the member joined with a double underscore (`i`, `o__0`, `i__key`).
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amaranth.hdl import ClockDomain, Module, Signal, Value, ValueCastable
from amaranth.lib import wiring
from amaranth.sim import Simulator

from nearflash.sim.stalls import SimulationTimeout, Stall, StallPattern, UnexpectedItems, find_stalls, waiting_text

__all__ = ["measure_latency", "run_streams", "transfer_cycles"]


def run_streams(
    component: Any,
    inputs: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, int],
    *,
    stalls: str | StallPattern = "none",
    seed: int = 0,
    hold: Mapping[str, int] | None = None,
    timeout_cycles: int | None = None,
    quiet_cycles: int = 16,
    vcd: Path | None = None,
) -> dict[str, list[Any]]:
    """Send `inputs`, wait for `outputs` items of each output stream, and return them by stream.

    Items are integers, or what the payload's layout takes (mappings, sequences); results are integers or
    `data.Const`, which compare equal to both. `hold` sets plain inputs for the whole run. After the last item the
    simulation runs on for `quiet_cycles`; `timeout_cycles` is by default 1000 and 200 for each item of the longest
    stream. `vcd` names a wave file to write.

    Raises SimulationTimeout that names the waiting streams, UnexpectedItems for an item too many, ValueError for
    streams that the component does not have.
    """
    ends = _simulate(component, inputs, outputs, find_stalls(stalls), seed, hold, timeout_cycles, quiet_cycles, vcd)
    return {name: ends[name].items for name in outputs}


def transfer_cycles(
    component: Any, inputs: Mapping[str, Sequence[Any]], outputs: Mapping[str, int], **options: Any
) -> dict[str, list[int]]:
    """As `run_streams`, but return for each stream, inputs too, the cycle in which each of its items moved."""
    options["stalls"] = find_stalls(options.get("stalls", "none"))
    defaults = {"seed": 0, "hold": None, "timeout_cycles": None, "quiet_cycles": 16, "vcd": None}
    ends = _simulate(component, inputs, outputs, **{**defaults, **options})
    return {name: end.cycles for name, end in ends.items()}


def measure_latency(
    component: Any, inputs: Mapping[str, Sequence[Any]], *, i: str = "i", o: str = "o", **options: Any
) -> int:
    """Cycles from the last item of `inputs[i]` moving in to the first item of `o` moving out, with no stalls."""
    cycles = transfer_cycles(component, inputs, {o: 1}, **options)
    return cycles[o][0] - cycles[i][-1]


@dataclass
class _End:
    """A source or sink: its stream's signals, the items to send or received, the cycles in which they moved."""

    payload: Any
    valid: Any
    ready: Any
    is_source: bool
    stall: Stall
    rng: random.Random
    items: list[Any] = field(default_factory=list)
    count: int = 0
    cycles: list[int] = field(default_factory=list)


def _ends(component: Any, stalls: StallPattern, seed: int) -> dict[str, _End]:
    """A source for every stream that the component reads, a sink for every one that it writes, by name."""
    signals: dict[str, dict[str, Any]] = {}
    is_source = {}
    for path, member, value in component.signature.flatten(component):
        if path[-1] in ("payload", "valid", "ready"):
            name = "__".join(map(str, path[:-1]))
            signals.setdefault(name, {})[path[-1]] = value
            if path[-1] == "payload":
                is_source[name] = member.flow == wiring.In
    return {
        name: _End(
            **parts,
            is_source=is_source[name],
            stall=stalls.of(name, is_source=is_source[name]),
            rng=random.Random(f"{seed} {name}"),
        )
        for name, parts in signals.items()
        if len(parts) == 3
    }


def _simulate(
    component: Any,
    inputs: Mapping[str, Sequence[Any]],
    outputs: Mapping[str, int],
    stalls: StallPattern,
    seed: int,
    hold: Mapping[str, int] | None,
    timeout_cycles: int | None,
    quiet_cycles: int,
    vcd: Path | None,
) -> dict[str, _End]:
    ends = _ends(component, stalls, seed)
    kinds = {name: "input" if end.is_source else "output" for name, end in ends.items()}
    for name, kind in [*((name, "input") for name in inputs), *((name, "output") for name in outputs)]:
        if kinds.get(name) != kind:
            raise ValueError(f"streams must be among {kinds}, not {name!r} as an {kind}")
    for name, end in ends.items():
        if end.is_source:
            end.items = list(inputs.get(name, ()))
        end.count = len(end.items) if end.is_source else outputs.get(name, 0)
    longest = max((end.count for end in ends.values()), default=0)
    limit = 1000 + 200 * longest if timeout_cycles is None else timeout_cycles
    _run(component, ends, hold or {}, limit, quiet_cycles, vcd)
    for name, end in ends.items():
        if len(end.cycles) > end.count:
            raise UnexpectedItems(f"{name} must give {end.count} items, not {len(end.cycles)}")
    return ends


def _run(
    component: Any, ends: Mapping[str, _End], hold: Mapping[str, int], limit: int, quiet_cycles: int, vcd: Path | None
) -> None:
    top = Module()
    top.domains.sync = ClockDomain()  # a combinational component has no domain to tick
    top.submodules.dut = component
    simulator = Simulator(top)
    simulator.add_clock(1e-6)
    done = Signal()

    # A process sets signals in the step of the clock's edge, as registers do: a testbench would have the design settle
    # behind each of them. There is one for all streams, which waits once in a cycle.
    async def move(ctx: Any) -> None:
        for name, value in hold.items():
            ctx.set(getattr(component, name), value)
        movers = [_source(end, ctx.set) if end.is_source else _sink(end, ctx.set) for end in ends.values()]
        for mover in movers:
            next(mover)
        flags = [end.ready if end.is_source else end.valid for end in ends.values()]
        payloads = [Value.cast(end.payload) for end in ends.values()]
        left = quiet_cycles
        cycle = 0
        async for _, _, *values in ctx.tick().sample(*flags, *payloads):
            cycle += 1
            left = left - 1 if all(len(end.cycles) >= end.count for end in ends.values()) else quiet_cycles
            if left and cycle == limit + quiet_cycles:
                raise SimulationTimeout(_waiting_text(ends, limit))
            for mover, flag, payload in zip(movers, values, values[len(flags) :], strict=False):
                mover.send((cycle, flag, payload))
            if not left:
                break
        ctx.set(done, 1)

    async def wait(ctx: Any) -> None:
        await ctx.posedge(done)

    simulator.add_process(move)
    simulator.add_testbench(wait)
    with simulator.write_vcd(str(vcd)) if vcd else nullcontext():
        simulator.run()


def _waiting_text(ends: Mapping[str, _End], limit: int) -> str:
    sources, sinks = (
        [(name, len(end.cycles), end.count) for name, end in ends.items() if end.is_source == is_source]
        for is_source in (True, False)
    )
    return waiting_text(limit, sources, sinks)


_Mover = Generator[None, tuple[int, int, int], None]
"""Drives one side of a stream: is sent each cycle's number, the other side's flag and the payload's bits."""


def _source(end: _End, drive: Callable[[Any, Any], None]) -> _Mover:
    stalled = end.stall.cycles(end.rng)
    for item in end.items:
        while end.stall.percent and next(stalled):
            yield
        as_bits = isinstance(item, int) and isinstance(end.payload, ValueCastable)
        drive(end.payload.as_value() if as_bits else end.payload, item)
        drive(end.valid, 1)
        ready = 0
        while not ready:
            cycle, ready, _ = yield
        end.cycles.append(cycle)
        drive(end.valid, 0)
    while True:
        yield


def _sink(end: _End, drive: Callable[[Any, Any], None]) -> _Mover:
    stalled = end.stall.cycles(end.rng)
    read = end.payload.shape().from_bits if isinstance(end.payload, ValueCastable) else int
    was_ready = False
    while True:
        ready = not (end.stall.percent and next(stalled))
        if ready != was_ready:
            drive(end.ready, ready)
            was_ready = ready
        cycle, valid, payload = yield
        if valid and ready:
            end.items.append(read(payload))
            end.cycles.append(cycle)
