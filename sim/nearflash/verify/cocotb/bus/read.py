"""cocotb testbench of nearflash.gateware.bus.read: cocotbext-axi's memory, and a slave with a fixed latency."""

import random
from collections import deque
from typing import Any

import cocotb
from cocotb.triggers import ReadOnly, RisingEdge
from cocotbext.axi import AxiRamRead, AxiReadBus

from nearflash.gateware.bus.read import BurstReader
from nearflash.sim.stalls import STALLS
from nearflash.verify.cocotb.testbench import parameters, receive, send, start, test

_BAD_PAGE = 7  # the slow slave responds to reads of this page with SLVERR


def component(data_width_bits: int = 64, max_outstanding: int = 8, max_burst_bytes: int = 512) -> BurstReader:
    """Make the reader: by default bursts of up to 64 beats, 8 in flight."""
    return BurstReader(data_width_bits, max_outstanding=max_outstanding, max_burst_bytes=max_burst_bytes)


def _beat_bytes() -> int:
    return int(parameters().get("data_width_bits", 64)) // 8


def _word(address: int, beats: int) -> int:
    return address | beats << 64


async def _watch(dut: Any) -> None:
    """Every burst is legal, 8 at most are in flight, and the reader is always ready for data."""
    in_flight = 0
    block_bytes = int(parameters().get("max_burst_bytes", 512))
    while True:
        await ReadOnly()
        if dut.bus__arvalid.value and dut.bus__arready.value:
            address, length = int(dut.bus__araddr.value), int(dut.bus__arlen.value)
            assert address % _beat_bytes() == 0
            assert address % block_bytes + (length + 1) * _beat_bytes() <= block_bytes
            in_flight += 1
            assert in_flight <= 8
        if dut.bus__rvalid.value:
            assert dut.bus__rready.value
            in_flight -= int(dut.bus__rlast.value)
        await RisingEdge(dut.clk)


async def _slow_slave(dut: Any, latency_cycles: int) -> None:
    """Takes every burst at once and responds, a beat a cycle, `latency_cycles` later; data is the beat's number."""
    due: deque[tuple[int, int, int, int]] = deque()  # cycle, data, last, response
    now = 0
    dut.bus__arready.value = 1
    while True:
        responds = bool(due) and due[0][0] <= now
        dut.bus__rvalid.value = responds
        if responds:
            _, dut.bus__rdata.value, dut.bus__rlast.value, dut.bus__rresp.value = due.popleft()
        await ReadOnly()
        if dut.bus__arvalid.value:
            address, length = int(dut.bus__araddr.value), int(dut.bus__arlen.value)
            response = 2 if address // 4096 == _BAD_PAGE else 0
            for beat in range(length + 1):
                number = address // _beat_bytes() + beat
                due.append((now + latency_cycles, number, beat == length, response))
        await RisingEdge(dut.clk)
        now += 1


async def _consume(dut: Any, count: int) -> tuple[list[int], int]:
    """Take `count` beats without a pause; the beats, and the cycles from the first to the last."""
    beats: list[int] = []
    cycles = 0
    dut.o__ready.value = 1
    while len(beats) < count:
        await ReadOnly()
        cycles += bool(beats)
        if dut.o__valid.value:
            beats.append(int(dut.o__payload.value))
        await RisingEdge(dut.clk)
    return beats, cycles


@test()
async def reads_what_memory_holds(dut: Any) -> None:
    """Commands of many lengths, some empty, from addresses unaligned to bursts, under every stall pattern."""
    await start(dut)
    dut.clear.value = 0
    memory = AxiRamRead(AxiReadBus.from_prefix(dut, "bus_"), dut.clk, dut.rst, size=1 << 14)
    cocotb.start_soon(_watch(dut))
    rng = random.Random(2)
    contents = rng.randbytes(1 << 14)
    memory.write(0, contents)
    size = _beat_bytes()
    for seed, (name, pattern) in enumerate(STALLS.items()):
        slave = STALLS["source"].source if name in ("source", "both", "bursty") else STALLS["none"].source
        for channel in (memory.ar_channel, memory.r_channel):
            channel.set_pause_generator(slave.cycles(random.Random(seed)))
        most = min(150, (1 << 14) // size // 2)
        commands = [(size * rng.randrange((1 << 14) // size - most), rng.choice((0, 1, 5, most))) for _ in range(10)]
        expected = [contents[address + size * beat :][:size] for address, beats in commands for beat in range(beats)]
        sender = cocotb.start_soon(send(dut, "i_command", [_word(*c) for c in commands], pattern.source, seed))
        received = await receive(dut, "o", len(expected), pattern.sink, seed)
        assert [beat.to_bytes(size, "little") for beat in received] == expected
        await sender
        await RisingEdge(dut.clk)
        await ReadOnly()
        assert dut.idle.value
        await RisingEdge(dut.clk)


@test()
async def one_beat_a_cycle_at_60_cycles_latency(dut: Any) -> None:
    """Two commands back to back, with a memory 60 cycles away."""
    await start(dut)
    dut.clear.value = 0
    cocotb.start_soon(_watch(dut))
    cocotb.start_soon(_slow_slave(dut, 60))
    size = _beat_bytes()
    first, second = (0, 1000), (0x10000 + 5 * size, 1000)
    cocotb.start_soon(send(dut, "i_command", [_word(*first), _word(*second)]))
    beats, cycles = await _consume(dut, 2000)
    assert beats == [address // size + beat for address, count in (first, second) for beat in range(count)]
    assert cycles == 2000 - 1


@test()
async def arvalid_follows_a_command_after_latency_cycles(dut: Any) -> None:
    """`LATENCY`, measured."""
    await start(dut)
    dut.clear.value = 0
    dut.i_command__payload.value = _word(0, 1)
    dut.i_command__valid.value = 1
    await RisingEdge(dut.clk)
    dut.i_command__valid.value = 0
    waits: list[int] = []
    for _ in range(BurstReader.LATENCY):
        await ReadOnly()
        waits.append(int(dut.bus__arvalid.value))
        await RisingEdge(dut.clk)
    await ReadOnly()
    assert waits == [0] * (BurstReader.LATENCY - 1) + [1]


@test()
async def the_first_error_is_kept_until_cleared(dut: Any) -> None:
    """SLVERR with its burst's address; the data flow on."""
    await start(dut)
    dut.clear.value = 0
    cocotb.start_soon(_slow_slave(dut, 4))
    size, bad = _beat_bytes(), _BAD_PAGE * 4096
    for command, expected in (((0, 4), 0), ((bad, 4), bad), ((bad + 1024, 4), bad)):
        cocotb.start_soon(send(dut, "i_command", [_word(*command)]))
        assert (await _consume(dut, 4))[0] == [command[0] // size + beat for beat in range(4)]
        error = int(dut.error.value)
        assert (error & 1, error >> 3) == (bool(expected), expected)
    dut.clear.value = 1
    await RisingEdge(dut.clk)
    await ReadOnly()
    assert int(dut.error.value) & 1 == 0
