import numpy as np
import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import Out

from nearflash.abi.crc import crc32c
from nearflash.abi.errors import StreamError
from nearflash.abi.formats import FP16
from nearflash.abi.topk import StreamFault, ValueFormat
from nearflash.gateware.gradients.topk import TopKExpander
from nearflash.model.gradients.topk import expand, fp32_pattern, pack
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.fixtures.gradients import bad_streams, random_stream

BAD = bad_streams()


class Reporting(wiring.Component):
    """The expander, and its fault as a stream: an item when a command has ended."""

    def __init__(self, lanes):
        self.expander = TopKExpander(lanes)
        members = {name: self.expander.signature.members[name] for name in ("i_command", "i", "o")}
        super().__init__({**members, "o_fault": Out(stream.Signature(3))})

    def elaborate(self, platform):
        m = Module()
        m.submodules.expander = expander = self.expander
        m.d.comb += expander.i_command.payload.eq(self.i_command.payload)
        for name in ("i", "o"):
            wiring.connect(m, getattr(expander, name), wiring.flipped(getattr(self, name)))
        waiting = Signal()
        m.d.comb += [self.o_fault.valid.eq(waiting & expander.idle), self.o_fault.payload.eq(expander.fault)]
        m.d.comb += expander.i_command.valid.eq(self.i_command.valid & ~waiting)
        m.d.comb += self.i_command.ready.eq(expander.i_command.ready & ~waiting)
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += waiting.eq(1)
        with m.Elif(self.o_fault.ready & self.o_fault.valid):
            m.d.sync += waiting.eq(0)
        return m


@pytest.fixture(scope="module")
def unit():
    return StreamUnit(Reporting(4), "topk-expander-4")


def inputs(streams):
    """Commands and words of (stream, params)."""
    commands = [params | len(stream) << 32 for stream, params in streams]
    words = [np.frombuffer(stream[: len(stream) // 8 * 8], "<u8") for stream, _ in streams]
    return {"i_command": np.array(commands, np.uint64), "i": np.concatenate(words)}


def rows(lanes, dense):
    """Groups of fp32 patterns, (groups, lanes); and which of them is the last."""
    padded = np.zeros(-(-len(dense) // lanes) * lanes, np.float32)
    padded[: len(dense)] = dense
    groups = padded.view(np.uint32).reshape(-1, lanes)
    return groups, np.arange(len(groups)) == len(groups) - 1


def some_streams(seed, value_format, cases=((4, 1.0), (4099, 0.02), (17, 0.0), (9, 0.5), (8192 + 3, 0.3), (4096, 1.0))):
    rng = np.random.default_rng(seed)
    return [(random_stream(rng, params, density, value_format), params) for params, density in cases]


@pytest.mark.parametrize("stalls", STALLS)
def test_equals_model(unit, stalls):
    """Command after command in all formats: tails, tiles without pairs, full tiles, several tiles."""
    streams = [stream for value_format in ValueFormat for stream in some_streams(value_format, value_format)]
    parts = [rows(4, expand(*stream)) for stream in streams]
    groups, last = (np.concatenate(part) for part in zip(*parts, strict=True))
    found = unit.run(
        inputs(streams), {"o": len(groups), "o_fault": len(streams)}, stalls=stalls, seed=1, timeout_cycles=1 << 17
    )
    np.testing.assert_array_equal(found["o"][:, :4], groups)
    np.testing.assert_array_equal(found["o"][:, 4], last)
    assert not found["o_fault"].any()


def test_a_tile_that_ends_with_a_group_of_two_rows(unit):
    """Its last three pairs lie in one group, but the first of them in the row before: both rows are to be dropped."""
    indices = np.array([0, 1, 2, 4092, 4093, 4094, 4095, 4097, 4098])
    stream = pack(indices, np.arange(1, 10, dtype=np.uint32), 4100, ValueFormat.FP32)
    found = unit.run(inputs([(stream, 4100)]), {"o": 1025, "o_fault": 1}, timeout_cycles=9000)["o"]
    np.testing.assert_array_equal(found[:, :4].reshape(-1)[indices], np.arange(1, 10))


@pytest.mark.parametrize(("lanes", "value_format"), [(1, ValueFormat.FP16), (2, ValueFormat.FP32)])
def test_fewer_lanes_equal_model(lanes, value_format):
    streams = some_streams(lanes, value_format, [(35, 0.6), (3, 1.0), (4100, 0.01)])
    parts = [rows(lanes, expand(*stream)) for stream in streams]
    expected = [
        {"data": sum(int(x) << 32 * k for k, x in enumerate(row)), "last": bool(last)}
        for groups, lasts in parts
        for row, last in zip(groups, lasts, strict=True)
    ]
    given = {name: values.tolist() for name, values in inputs(streams).items()}
    assert run_streams(TopKExpander(lanes), given, {"o": len(expected)}, stalls="source")["o"] == expected


@pytest.mark.parametrize("stalls", ["none", "both"])
def test_a_bad_stream_is_named_and_taken_whole_and_the_next_one_is_good(unit, stalls):
    good = some_streams(7, ValueFormat.FP16, [(4100, 0.05)])[0]
    streams = [each for bad in BAD.values() for each in ((bad.stream, bad.params), good)]
    counts = [-(-params // 4) for _, params in streams]
    given = inputs(streams)
    found = unit.run(given, {"o": sum(counts), "o_fault": len(streams)}, stalls=stalls, seed=2, timeout_cycles=1 << 19)
    faults = {name: StreamFault(int(fault)) for name, fault in zip(BAD, found["o_fault"][::2], strict=True)}
    assert faults == {name: bad.fault for name, bad in BAD.items()}
    assert not found["o_fault"][1::2].any()
    parts = np.split(found["o"], np.cumsum(counts)[:-1])
    assert all(part[:, 4].tolist() == [0] * (len(part) - 1) + [1] for part in parts)
    for part in parts[1::2]:
        np.testing.assert_array_equal(part[:, :4], rows(4, expand(*good))[0])


def test_nothing_of_a_bad_tile_comes_out(unit):
    """Pairs of the first tile may, of the second none. Values of these streams are the numbers of their pairs."""
    of_the_first = [fp32_pattern(number, FP16) for number in range(5)]
    for name, bad in BAD.items():
        groups = -(-bad.params // 4)
        found = unit.run(inputs([(bad.stream, bad.params)]), {"o": groups, "o_fault": 1}, timeout_cycles=9000)
        first, second = np.split(found["o"][:, :4].reshape(-1), [4096])
        assert not second.any(), name
        assert np.isin(first, of_the_first if "first" not in name else [0]).all(), name


def damaged(rng, params):
    """A stream with a bit or two inverted, cut off, or with bytes behind it; or a good one."""
    density, value_format = rng.choice([0, 0.002, 0.1, 1]), ValueFormat(int(rng.integers(3)))
    stream, kind = bytearray(random_stream(rng, params, density, value_format)), rng.integers(6)
    for bit in rng.integers(0, 8 * len(stream), kind if kind < 3 else 0).tolist():
        stream[bit // 8] ^= 1 << bit % 8
    stream = stream[: rng.integers(len(stream) + 1)] if kind == 3 else stream
    stream += rng.bytes(int(rng.integers(1, 40))) if kind == 4 else b""
    if kind >= 3 and len(stream) >= 32:  # its header knows
        stream[20:24] = len(stream).to_bytes(4, "little")
        stream[28:32] = crc32c(bytes(stream[:28])).to_bytes(4, "little")
    return bytes(stream)


def fault_of(stream, params):
    try:
        expand(stream, params)
    except StreamError as error:
        return error.fault
    return StreamFault.NONE


@pytest.mark.parametrize("stalls", ["none", "both"])
def test_random_damage_is_named_as_the_model_names_it(unit, stalls):
    rng = np.random.default_rng(5)
    sizes = [int(rng.choice([rng.integers(1, 40), 4096, rng.integers(8190, 8200)])) for _ in range(100)]
    streams = [(damaged(rng, params), params) for params in sizes]
    counts = {"o": sum(-(-params // 4) for params in sizes), "o_fault": len(streams)}
    found = unit.run(inputs(streams), counts, stalls=stalls, seed=3, timeout_cycles=1 << 19)
    faults = [fault_of(*stream) for stream in streams]
    assert found["o_fault"].tolist() == faults
    assert len(set(faults)) > 3


@pytest.mark.parametrize(
    ("value_format", "density"), [(ValueFormat.FP16, 0.01), (ValueFormat.BF16, 0.49), (ValueFormat.FP32, 0.32)]
)
def test_no_group_waits(unit, value_format, density):
    """All groups of 32 tiles, and the time that the first tile takes to come in."""
    params = 32 * 4096
    stream = random_stream(np.random.default_rng(3), params, density, value_format)
    unit.run(inputs([(stream, params)]), {"o": params // 4, "o_fault": 1}, quiet_cycles=1, timeout_cycles=1 << 16)
    assert unit.cycles < params // 4 + len(stream) // 8 / 32 + 128


def test_latency():
    stream = some_streams(5, ValueFormat.FP16, [(3, 1.0)])[0]
    given = {name: values.tolist() for name, values in inputs([stream]).items()}
    assert measure_latency(TopKExpander(4), given) == TopKExpander.LATENCY


def test_messages():
    with pytest.raises(ValueError, match="lanes must be 1, 2 or 4, not 8"):
        TopKExpander(8)
