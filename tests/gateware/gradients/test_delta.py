import numpy as np
import pytest

from nearflash.abi.delta import DeltaHeader
from nearflash.abi.topk import ValueFormat
from nearflash.device.backends.host import delta as host
from nearflash.gateware.gradients.delta import DeltaPacker
from nearflash.model.gradients.delta import apply_delta, delta_of
from nearflash.sim.pysim.harness import transfer_cycles
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.sim.verilator.streams import StreamUnit


@pytest.fixture(scope="module", params=[*(pytest.param(lanes, marks=pytest.mark.full) for lanes in (1, 2)), 4])
def unit(request):
    unit = StreamUnit(DeltaPacker(request.param), f"delta-packer-{request.param}")
    unit.lanes = request.param
    return unit


def words_of(seed, params, shares):
    """Old and new words: of each tile another share changes, of the words in it, in one bit."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1 << 16, params, np.uint16)
    share = np.repeat(rng.permuted(np.resize(shares, -(-params // 4096))), 4096)[:params]
    flips = np.where(rng.random(params) < share, 1 << rng.integers(0, 16, params), 0).astype(np.uint16)
    return old, old ^ flips


def groups(old, new, lanes):
    """Groups of lanes; those past the parameters differ, and nobody may see it."""
    spare = -old.size % lanes
    old, new = np.append(old, np.full(spare, 1)), np.append(new, np.full(spare, 2))
    rows = np.concatenate([old.reshape(-1, lanes), new.reshape(-1, lanes)], axis=1).astype("<u2")
    integers = [int.from_bytes(row.tobytes(), "little") for row in rows]
    integers[-1] |= 1 << 32 * lanes
    bits = 32 * lanes + 1
    return np.array(integers, np.uint64) if bits <= 64 else words_from_integers(integers, bits)


def pack(unit, old, new, value_format, **options):
    """The delta: the words of each part at its place."""
    expected = delta_of(old.tolist(), new.tolist(), value_format)
    tiles = -(-old.size // 4096)
    found = unit.run(
        {"i": groups(old, new, unit.lanes), "i_command": np.array([old.size | int(value_format) << 32], np.uint64)},
        {"o": len(expected) // 8, "o_command": tiles + 1},
        **options,
    )
    memory, at = np.zeros(len(expected) // 8, np.uint64), 0
    for part in found["o_command"].tolist():
        first, size = part & 0xFFFFFFFF, part >> 32 & 0xFFFF
        assert part >> 48 == (first == 0 or first + size == memory.size)
        memory[first : first + size] = found["o"][at : at + size]
        at += size
    return memory.tobytes(), expected


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize(
    "params", [1, 4097, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 4096, 12_001, 40_960))]
)
def test_a_delta_is_the_models_to_the_bit(unit, stalls, params):
    """Tiles without a change, with few, with a quarter and one more, and with all, in any order."""
    old, new = words_of(params, params, [0, 0.002, 0.04, 0.249, 0.251, 1])
    found, expected = pack(unit, old, new, ValueFormat.BF16, stalls=stalls, seed=params)
    assert found == expected
    assert apply_delta(found, old.tolist()) == new.tolist()


def test_one_command_after_another(unit):
    """Nothing of one is left for the next: counts, checksums, places."""
    for seed, (params, share) in enumerate([(5000, 1), (7, 0.3), (8192, 0), (4095, 0.1)]):
        old, new = words_of(seed, params, [share])
        found, expected = pack(unit, old, new, ValueFormat.FP16)
        assert found == expected and DeltaHeader.unpack(found[:32], len(found)).value_format is ValueFormat.FP16


@pytest.mark.parametrize("changed", [1023, 1024, 1025])
def test_around_a_quarter(unit, changed):
    """The longest list of pairs, and the tile that is dense."""
    old = np.zeros(4096, np.uint16)
    new = old.copy()
    new[np.random.default_rng(changed).permutation(4096)[:changed]] = 0x8000  # -0 is not 0
    found, expected = pack(unit, old, new, ValueFormat.BF16)
    assert found == expected and (host.changes_of(np.frombuffer(found, np.uint8)).indices.size > changed) == (
        changed > 1024
    )


def test_other_lanes_are_refused():
    with pytest.raises(ValueError, match="lanes must be 1, 2 or 4, not 8"):
        DeltaPacker(8)


def items(old, new, lanes):
    rows = zip(old.reshape(-1, lanes).tolist(), new.reshape(-1, lanes).tolist(), strict=True)
    given = [{"old": before, "new": after, "last": 0} for before, after in rows]
    given[-1]["last"] = 1
    return given


@pytest.mark.parametrize(("params", "words"), [(1, 1), (4, 1), (64, 16)])
def test_latency(params, words):
    """Of one dense tile, beside a cycle for each word of it."""
    given = {"i_command": [{"params": params, "value_format": 2}]}
    given["i"] = items(np.zeros(params, np.uint16), np.ones(params, np.uint16), 1)
    cycles = transfer_cycles(DeltaPacker(1), given, {"o": 4 + 1 + words, "o_command": 2})
    assert cycles["o_command"][0] - cycles["i"][-1] == DeltaPacker.LATENCY + words


@pytest.mark.parametrize(("lanes", "share"), [pytest.param(1, 1.0, marks=pytest.mark.full), (4, 0.2)])
def test_a_group_a_cycle(lanes, share):
    """While tiles go out that are dense (one lane) or of which a fifth changes (four)."""
    old, new = words_of(9, 3 * 4096, [share])
    expected = len(delta_of(old.tolist(), new.tolist(), ValueFormat.BF16)) // 8
    given = {"i_command": [{"params": old.size, "value_format": 2}], "i": items(old, new, lanes)}
    cycles = transfer_cycles(DeltaPacker(lanes), given, {"o": expected, "o_command": 4})
    assert cycles["i"][-1] - cycles["i"][0] == old.size // lanes - 1
