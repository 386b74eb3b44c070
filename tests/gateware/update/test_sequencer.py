"""The sequencer refuses bad commands, gives good ones to both sides, and reports the first fault."""

from typing import Any

import pytest
from amaranth.sim import Simulator

from nearflash.abi.kernel.commands import CopyFormat, Status
from nearflash.abi.registers import SPLIT_BIT, UPDATE
from nearflash.gateware.bus.registers import RegisterFile
from nearflash.gateware.update.fetch import INPUTS
from nearflash.gateware.update.sequencer import Sequencer
from nearflash.gateware.update.store import OUTPUTS

GOOD = {f"{name}_address": 0x1000 * (k + 1) for k, name in enumerate(INPUTS)} | {
    f"{name}_out_address": 0x8000 * (k + 1) for k, name in enumerate(OUTPUTS)
}


class Run:
    """One command through a sequencer whose fetch and store take and finish at given cycles."""

    def __init__(self, config: Any, change: dict[str, Any], errors: dict[str, dict[int, int]] | None = None) -> None:
        registers = RegisterFile(config.registers)
        registers._MustUse__silence = True
        self.unit = unit = Sequencer(config, registers.values.shape())
        values = {**GOOD, "params": 100, **change}
        program = {name: values.pop(name, 0) for name in ("copy_format", "state_format")}
        program = UPDATE["program"].pack(program) | values.pop("split", 0) << SPLIT_BIT
        self.commands: dict[str, Any] = {}
        self.order: list[str] = []
        self.clears_before_done = 0

        async def drive(ctx):  # type: ignore[no-untyped-def]
            ctx.set(unit.values, values)
            ctx.set(unit.values.program.as_value(), program)
            ctx.set(unit.fetch_idle, 1)
            ctx.set(unit.store_idle, 1)
            assert ctx.get(unit.clear)
            ctx.set(unit.start, 1)
            await ctx.tick()
            ctx.set(unit.start, 0)
            for cycle in range(200):
                if ctx.get(unit.done):
                    break
                self.clears_before_done += ctx.get(unit.clear)
                for name in ("fetch", "store"):
                    side = getattr(unit, name)
                    taken = ctx.get(side.valid) and cycle % 5 == 4
                    ctx.set(side.ready, int(taken))
                    if taken:
                        self.order.append(name)
                        self.commands[name] = ctx.get(side.payload)
                        ctx.set(getattr(unit, f"{name}_idle"), 0)
                        self.busy_until = cycle + 40
                if self.order and cycle == self.busy_until:
                    for side_name, faults in (errors or {}).items():
                        for port, address in faults.items():
                            ctx.set(getattr(unit, f"{side_name}_error")[port], {"seen": 1, "address": address})
                    ctx.set(unit.fetch_idle, 1)
                    ctx.set(unit.store_idle, 1)
                await ctx.tick()
            else:
                raise AssertionError("no done within 200 cycles")
            self.status, self.fault_address = ctx.get(unit.status), ctx.get(unit.fault_address)
            self.done_cycle = cycle

        sim = Simulator(unit)
        sim.add_clock(1e-6)
        sim.add_testbench(drive)
        sim.run()


def test_both_sides_get_their_command_and_done_waits_for_both(small: Any) -> None:
    run = Run(small, {"copy_format": CopyFormat.BF16})
    assert run.status == Status.OK
    assert run.order == ["store", "fetch"]
    fetch, store = run.commands["fetch"], run.commands["store"]
    assert [int(a) for a in fetch.address] == [GOOD[f"{name}_address"] for name in INPUTS]
    assert [int(a) for a in store.address] == [GOOD[f"{name}_out_address"] for name in OUTPUTS]
    assert (fetch.params, store.params, store.copy) == (100, 100, 1)
    assert run.done_cycle > run.busy_until
    assert run.clears_before_done == 0


@pytest.mark.parametrize("name", list(GOOD))
def test_a_misaligned_address_ends_the_command_at_once(small: Any, name: str) -> None:
    run = Run(small, {name: 0x4008, "copy_format": CopyFormat.FP16})
    assert (run.status, run.fault_address) == (Status.MISALIGNED, 0x4008)
    assert run.order == []


def test_the_copys_address_does_not_matter_without_a_copy(small: Any) -> None:
    run = Run(small, {"copy_out_address": 0x4001})
    assert run.status == Status.OK
    assert run.commands["store"].copy == 0


@pytest.mark.parametrize(("form", "multiple"), [(0, 16), (1, 8), (2, 4)])
@pytest.mark.parametrize("name", list(GOOD))
def test_narrow_state_needs_a_part_of_the_ports_width(narrow: Any, name: str, form: int, multiple: int) -> None:
    least = multiple if name[0] in "mv" else 16
    change = {"copy_format": CopyFormat.FP16, "state_format": form, "params": 96}
    assert Run(narrow, {**change, name: 0x4000 + least}).status == Status.OK
    run = Run(narrow, {**change, name: 0x4000 + least // 2})
    assert (run.status, run.fault_address, run.order) == (Status.MISALIGNED, 0x4000 + least // 2, [])


def test_format_scales_and_dither_reach_both_sides(narrow: Any) -> None:
    scales = {"m_scale_address": 1, "v_scale_address": 2, "m_scale_out_address": 3, "v_scale_out_address": 5}
    run = Run(narrow, {**scales, "state_format": 2, "params": 64, "step": 9, "first_param": (1 << 40) - 32})
    fetch, store = run.commands["fetch"], run.commands["store"]
    assert (fetch.form, [int(a) for a in fetch.scale_address]) == (2, [1, 2])
    assert (store.form, [int(a) for a in store.scale_address]) == (2, [3, 5])
    assert (store.dither.step, store.dither.first_param) == (9, (1 << 40) - 32)


@pytest.mark.parametrize("name", ["p_address", "p_out_address", "rest_address", "rest_out_address"])
def test_halves_of_masters_need_half_the_ports_width(split: Any, name: str) -> None:
    half, params = split.port_bytes // 2, {"params": 96}
    assert Run(split, {**params, name: 0x4000 + half, "split": 1}).status == Status.OK
    run = Run(split, {**params, name: 0x4000 + half // 2, "split": 1})
    assert (run.status, run.fault_address, run.order) == (Status.MISALIGNED, 0x4000 + half // 2, [])
    # An fp32 master has no rests, and its address is a port's width's multiple.
    whole = Run(split, {**params, name: 0x4000 + half})
    assert whole.status == (Status.MISALIGNED if name[0] == "p" else Status.OK)


@pytest.mark.parametrize(
    "change",
    [{"state_format": 3}, {"state_format": 2, "params": 33}, {"state_format": 2, "params": 64, "first_param": 16}],
)
def test_unknown_formats_and_parts_of_blocks_end_at_once(narrow: Any, change: dict[str, int]) -> None:
    run = Run(narrow, {"params": 64, **change})
    assert (run.status, run.fault_address, run.order) == (Status.UNSUPPORTED, 0, [])


def test_narrow_state_ends_at_once_where_the_build_has_none(small: Any) -> None:
    for form in (1, 2, 3):
        run = Run(small, {"state_format": form, "params": 64})
        assert (run.status, run.order) == (Status.UNSUPPORTED, [])


def test_an_empty_command_ends_at_once(small: Any) -> None:
    run = Run(small, {"params": 0})
    assert (run.status, run.order) == (Status.EMPTY, [])


@pytest.mark.parametrize(
    ("errors", "status", "address"),
    [
        ({"fetch": {2: 0x30, 3: 0x40}}, Status.READ_ERROR, 0x30),
        ({"store": {0: 0x50}}, Status.WRITE_ERROR, 0x50),
        ({"fetch": {3: 0x40}, "store": {0: 0x50}}, Status.READ_ERROR, 0x40),
    ],
)
def test_the_first_fault_is_reported(small: Any, errors: Any, status: Status, address: int) -> None:
    run = Run(small, {}, errors)
    assert (run.status, run.fault_address) == (status, address)
