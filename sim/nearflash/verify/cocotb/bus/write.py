"""cocotb testbench of nearflash.gateware.bus.write: cocotbext-axi's memory, and a slave with a fixed latency."""

import random
from collections import deque
from typing import Any

import cocotb
from cocotb.triggers import ReadOnly, RisingEdge
from cocotbext.axi import AxiRamWrite, AxiWriteBus

from nearflash.gateware.bus.write import BurstWriter
from nearflash.sim.stalls import STALLS
from nearflash.verify.cocotb.testbench import parameters, send, start, test

_BAD_PAGE = 7  # the slow slave responds to writes to this page with DECERR


def component(
    data_width_bits: int = 64, max_outstanding: int = 8, max_burst_bytes: int = 512, queue_beats: int | None = None
) -> BurstWriter:
    """Make the writer: by default bursts of up to 64 beats, 8 in flight."""
    return BurstWriter(
        data_width_bits, max_outstanding=max_outstanding, max_burst_bytes=max_burst_bytes, queue_beats=queue_beats
    )


def _beat_bytes() -> int:
    return int(parameters().get("data_width_bits", 64)) // 8


def _burst_bytes() -> int:
    return int(parameters().get("max_burst_bytes", 512))


def _beat(data: int, strb: int | None = None) -> int:
    size = _beat_bytes()
    return data | ((1 << size) - 1 if strb is None else strb) << 8 * size


def _word(address: int, beats: int) -> int:
    return address | beats << 64


async def _idle(dut: Any) -> None:
    while True:
        await RisingEdge(dut.clk)
        await ReadOnly()
        if dut.idle.value:
            await RisingEdge(dut.clk)
            return


async def _watch(dut: Any) -> None:
    """Bursts are legal, 8 at most have no response, W gives as many beats as AW states, without a pause in a burst."""
    in_flight, inside, was_waiting = 0, False, False
    lengths: deque[int] = deque()
    while True:
        await ReadOnly()
        if dut.bus__awvalid.value and not was_waiting:
            address, length = int(dut.bus__awaddr.value), int(dut.bus__awlen.value)
            assert address % _beat_bytes() == 0
            assert address % _burst_bytes() + (length + 1) * _beat_bytes() <= _burst_bytes()
            lengths.append(length)
        assert not was_waiting or dut.bus__awvalid.value
        was_waiting = bool(dut.bus__awvalid.value and not dut.bus__awready.value)
        in_flight += bool(dut.bus__awvalid.value and dut.bus__awready.value) - bool(dut.bus__bvalid.value)
        assert in_flight <= 8
        assert not inside or dut.bus__wvalid.value
        if dut.bus__wvalid.value and dut.bus__wready.value:
            assert bool(dut.bus__wlast.value) == (lengths[0] == 0)
            inside = not dut.bus__wlast.value
            if inside:
                lengths[0] -= 1
            else:
                lengths.popleft()
        await RisingEdge(dut.clk)


async def _slow_slave(dut: Any, latency_cycles: int, beats: list[int]) -> None:
    """Takes AW and W at once, W into `beats`, and responds `latency_cycles` after a burst's last beat."""
    addresses: deque[int] = deque()
    due: deque[tuple[int, int]] = deque()  # cycle, response
    now = 0
    dut.bus__awready.value = dut.bus__wready.value = 1
    while True:
        responds = bool(due) and due[0][0] <= now
        dut.bus__bvalid.value = responds
        if responds:
            dut.bus__bresp.value = due.popleft()[1]
        await ReadOnly()
        if dut.bus__awvalid.value:
            addresses.append(int(dut.bus__awaddr.value))
        if dut.bus__wvalid.value:
            beats.append(int(dut.bus__wdata.value))
            if dut.bus__wlast.value:
                due.append((now + latency_cycles, 3 if addresses.popleft() // 4096 == _BAD_PAGE else 0))
        await RisingEdge(dut.clk)
        now += 1


@test()
async def memory_holds_what_was_written(dut: Any) -> None:
    """Commands of many lengths, random strobes, every stall pattern: the whole memory compared."""
    await start(dut)
    dut.clear.value = 0
    memory = AxiRamWrite(AxiWriteBus.from_prefix(dut, "bus_"), dut.clk, dut.rst, size=1 << 14)
    cocotb.start_soon(_watch(dut))
    rng = random.Random(3)
    expected = bytearray(rng.randbytes(1 << 14))
    memory.write(0, bytes(expected))
    size = _beat_bytes()
    for seed, (name, pattern) in enumerate(STALLS.items()):
        slave = STALLS["sink"].sink if name in ("sink", "both", "bursty") else STALLS["none"].sink
        for number, channel in enumerate((memory.aw_channel, memory.w_channel, memory.b_channel)):
            channel.set_pause_generator(slave.cycles(random.Random(f"{seed} {number}")))
        most = min(150, (1 << 14) // size // 2)
        commands = [(size * rng.randrange((1 << 14) // size - most), rng.choice((0, 1, 5, most))) for _ in range(8)]
        beats = []
        for address, count in commands:
            for beat in range(count):
                data, strb = rng.getrandbits(8 * size), rng.getrandbits(size)
                beats.append(_beat(data, strb))
                for lane in range(size):
                    if strb >> lane & 1:
                        expected[address + beat * size + lane] = data >> 8 * lane & 0xFF
        sender = cocotb.start_soon(send(dut, "i_command", [_word(*c) for c in commands], pattern.source, seed))
        await send(dut, "i", beats, pattern.source, seed + 100)
        await sender
        await _idle(dut)
        assert memory.read(0, 1 << 14) == bytes(expected)


@test()
async def one_beat_a_cycle_at_60_cycles_latency(dut: Any) -> None:
    """Two commands back to back, with responses 60 cycles after their bursts: no beat of the producer waits."""
    await start(dut)
    dut.clear.value = 0
    cocotb.start_soon(_watch(dut))
    written: list[int] = []
    cocotb.start_soon(_slow_slave(dut, 60, written))
    await send(dut, "i_command", [_word(0, 1000)])
    cocotb.start_soon(send(dut, "i_command", [_word(0x10000 + 5 * _beat_bytes(), 1000)]))
    dut.i__valid.value = 1
    for number in range(2000):
        dut.i__payload.value = _beat(number)
        await ReadOnly()
        assert dut.i__ready.value
        await RisingEdge(dut.clk)
    dut.i__valid.value = 0
    await _idle(dut)
    assert written == list(range(2000))


@test()
async def awvalid_follows_the_last_beat_after_latency_cycles(dut: Any) -> None:
    """`LATENCY`, measured."""
    await start(dut)
    dut.clear.value = 0
    await send(dut, "i_command", [_word(0, 3)])
    await send(dut, "i", [_beat(0), _beat(1)])
    for _ in range(5):
        await ReadOnly()
        assert not dut.bus__awvalid.value
        await RisingEdge(dut.clk)
    await send(dut, "i", [_beat(2)])
    for _ in range(BurstWriter.LATENCY - 1):
        await ReadOnly()
        assert not dut.bus__awvalid.value
        await RisingEdge(dut.clk)
    await ReadOnly()
    assert dut.bus__awvalid.value


@test()
async def a_burst_waits_for_aw_while_its_beats_leave_and_more_come(dut: Any) -> None:
    """Regression: the count of beats without a burst overflowed, and awvalid fell before awready."""
    await start(dut)
    dut.clear.value = 0
    cocotb.start_soon(_watch(dut))
    dut.bus__wready.value = 1
    cocotb.start_soon(send(dut, "i_command", [_word(0, 1000)]))
    cocotb.start_soon(send(dut, "i", [_beat(number) for number in range(1000)]))
    for _ in range(1000):
        await RisingEdge(dut.clk)
    await ReadOnly()
    assert dut.bus__awvalid.value
    assert not dut.i__ready.value


@test()
async def the_first_error_is_kept_until_cleared(dut: Any) -> None:
    """DECERR with its burst's address; later bursts go on."""
    await start(dut)
    dut.clear.value = 0
    written: list[int] = []
    cocotb.start_soon(_slow_slave(dut, 4, written))
    bad = _BAD_PAGE * 4096
    for command, expected in (((0, 4), 0), ((bad, 4), bad), ((bad + 1024, 4), bad)):
        await send(dut, "i_command", [_word(*command)])
        await send(dut, "i", [_beat(number) for number in range(4)])
        await _idle(dut)
        error = int(dut.error.value)
        assert (error & 1, error >> 3) == (bool(expected), expected)
    assert written == [0, 1, 2, 3] * 3
    dut.clear.value = 1
    await RisingEdge(dut.clk)
    await ReadOnly()
    assert int(dut.error.value) & 1 == 0
