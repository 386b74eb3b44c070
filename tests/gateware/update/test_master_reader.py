"""The master reader gives every parameter's fp32 word, of p or of its two halves, wherever these begin."""

import random
from typing import Any

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.sim import Simulator

from nearflash.gateware.update.master_reader import MasterReader, join_halves
from nearflash.gateware.update.pipeline import weight_of
from nearflash.model.update.state import join_master, split_master
from nearflash.sim.verilator.streams import StreamUnit

MEMORY = random.Random(1).randbytes(3 * 4096)


def _read(config: Any, serve_reads: Any, commands: Any, bad_page: int = -1) -> tuple[list[list[int]], Any]:
    """Words of each command (params, split, address of p or the weights, that of the rests), and the error."""
    reader, found, errors = MasterReader(config), [], []

    async def run(ctx):  # type: ignore[no-untyped-def]
        rng = random.Random(1)
        for params, split, address, rest_address in commands:
            command = {"address": address, "rest_address": rest_address, "params": params, "split": split}
            ctx.set(reader.i_command.payload, command)
            ctx.set(reader.i_command.valid, 1)
            await ctx.tick().until(reader.i_command.ready)
            ctx.set(reader.i_command.valid, 0)
            ctx.set(reader.i_groups.payload, -(-params // config.lanes))
            ctx.set(reader.i_groups.valid, 1)
            await ctx.tick().until(reader.i_groups.ready)
            ctx.set(reader.i_groups.valid, 0)
            words, last = [], 0
            while not last:
                await ctx.tick().repeat(rng.randint(1, 3))
                ctx.set(reader.o.ready, 1)
                group = (await ctx.tick().sample(reader.o.payload).until(reader.o.valid))[0]
                ctx.set(reader.o.ready, 0)
                words += [group.data >> 32 * lane & 0xFFFFFFFF for lane in range(config.lanes)]
                last = group.last
            assert len(words) == -(-params // config.lanes) * config.lanes
            found.append(words[:params])
            await ctx.tick().repeat(20)
            assert not ctx.get(reader.o.valid) and ctx.get(reader.idle)
        errors.append((ctx.get(reader.error.seen), ctx.get(reader.error.address)))

    sim = Simulator(reader)
    sim.add_clock(1e-6)
    sim.add_testbench(run)
    sim.add_testbench(serve_reads(reader.bus, MEMORY, seed=1, bad_page=bad_page), background=True)
    sim.run()
    return found, errors[0]


def _words(params: int, split: int, address: int, rest_address: int) -> list[int]:
    if not split:
        return np.frombuffer(MEMORY, "<u4", params, address).tolist()
    halves = (np.frombuffer(MEMORY, "<u2", params, at) for at in (address, rest_address))
    return join_master(*halves).tolist()


def test_words_are_those_of_p_or_of_its_halves(split: Any, serve_reads: Any) -> None:
    """Commands of both kinds take turns; halves begin anywhere at a multiple of half the port's width."""
    half = split.port_bytes // 2
    kinds = [(1, 1), (40, 1), (33, 0), (7, 1), (2, 0), (64, 1), (81, 1)]
    commands = [(params, kind, 4096 - half * (4 + (params & kind)), half * place)
                for place, (params, kind) in enumerate(kinds)]  # fmt: skip
    found, error = _read(split, serve_reads, commands)
    assert found == [_words(*command) for command in commands]
    assert error == (0, 0)


@pytest.mark.parametrize(("address", "rest_address", "seen"), [(4096, 0, 4096), (0, 8192 - 64, 8192 - 64), (0, 0, 0)])
def test_either_readers_error_is_kept(split: Any, serve_reads: Any, address: int, rest_address: int, seen: int) -> None:
    found, (is_seen, at) = _read(split, serve_reads, [(16, 1, address, rest_address)], bad_page=1)
    assert (is_seen, at) == (seen > 0, seen)
    assert len(found[0]) == 16


class Halves(wiring.Component):
    """Joins eight weights and rests, and splits what comes of it."""

    LANES = 8
    i: In(stream.Signature(data.ArrayLayout(32, LANES)))
    o: Out(stream.Signature(data.ArrayLayout(48, LANES)))

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += [self.o.valid.eq(self.i.valid), self.i.ready.eq(self.o.ready)]
        for given, result in zip(self.i.payload, self.o.payload, strict=True):
            word = join_halves(given[16:], given[:16])
            m.d.comb += [result[:32].eq(word), result[32:].eq(weight_of(word))]
        return m


@pytest.mark.parametrize("rests", [1 << 8, pytest.param(1 << 16, marks=pytest.mark.full)])
def test_every_exponent_class_with_every_rest(rests: int) -> None:
    """Zero, subnormal, least, ordinary, greatest, infinite and NaN, of both signs, with mantissas that carry: the
    model's join, and its split, but for a NaN, which comes back as it is."""
    tops = np.array([sign | exponent << 7 | mantissa for sign in (0, 0x8000) for exponent in (0, 1, 127, 128, 254, 255)
                     for mantissa in (0, 1, 0x3F, 0x40, 0x7E, 0x7F)], np.uint16)  # fmt: skip
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint16)
    rng = np.random.default_rng(1)
    drawn = np.arange(rests, dtype=np.uint16) if rests == 1 << 16 else rng.integers(0, 1 << 16, rests - 6, np.uint16)
    rest = np.tile(np.unique(np.concatenate([drawn, ends])), len(tops))
    weight = np.repeat(tops, len(rest) // len(tops))
    lanes = Halves.LANES
    spare = -len(rest) % lanes
    rest, weight = (np.append(half, np.zeros(spare, np.uint16)) for half in (rest, weight))
    given = (weight.astype(np.uint32) << 16 | rest).reshape(-1, lanes)
    found = StreamUnit(Halves(), "update-master-halves").run({"i": given}, {"o": len(given)})["o"]
    halfwords = np.ascontiguousarray(found).view("<u2").reshape(-1, lanes, 3).reshape(-1, 3)
    words = halfwords[:, 0].astype(np.uint32) | halfwords[:, 1].astype(np.uint32) << 16
    np.testing.assert_array_equal(words, join_master(weight, rest))
    np.testing.assert_array_equal(halfwords[:, 2], weight)
    plain = ~np.isnan(words.view(np.float32)) | (words & 0xFFFF == 0)
    split = split_master(words[plain])
    np.testing.assert_array_equal(split[0], weight[plain])
    np.testing.assert_array_equal(split[1], rest[plain])
