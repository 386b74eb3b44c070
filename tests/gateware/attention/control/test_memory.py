import random

import pytest

from nearflash.abi.attention.codeword import SEALED_BYTES
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.memory import MemorySource
from nearflash.gateware.attention.engine.interfaces import RequestKind
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.read_memory import WithMemory

BEATS = SEALED_BYTES // 8
WORDS = [random.Random(1).getrandbits(64) for _ in range(1 << 13)]


def source(**options):
    return WithMemory(MemorySource(CONFIGS["attend-pynq-z2"]), WORDS, **options)


def requests(seed, count):
    rng = random.Random(seed)
    masks = [1, 1 << 63, 0b11, 0b1011_0111_0001]
    masks += [rng.getrandbits(8) << rng.randrange(48) | 1 << rng.randrange(64) for _ in range(count)]
    return [
        {
            "channel": rng.randrange(16),
            "request": {
                "context": rng.randrange(64), "kind": rng.choice(list(RequestKind)), "index": rng.getrandbits(20),
                "block": rng.getrandbits(13), "page": rng.getrandbits(8), "expected": rng.getrandbits(9),
                "codewords": mask, "rows": rng.getrandbits(64), "memory": 1, "address": 8 * rng.randrange(3000),
            },
        }
        for mask in masks
    ]  # fmt: skip


def expected_beats(items):
    return [
        WORDS[(item["request"]["address"] // 8 + BEATS * number + beat) % len(WORDS)]
        for item in items
        for number in range(64)
        if item["request"]["codewords"] >> number & 1
        for beat in range(BEATS)
    ]


@pytest.mark.parametrize("stalls", STALLS)
def test_header_and_wanted_codewords_of_every_request(stalls):
    items = requests(7, 2)
    beats = expected_beats(items)
    got = run_streams(
        source(pause=3), {"i": items}, {"o_header": len(items), "o": len(beats)}, stalls=stalls, timeout_cycles=60_000
    )
    assert got["o"] == beats
    kept = [{name: v for name, v in item["request"].items() if name not in ("memory", "address")} for item in items]
    assert got["o_header"] == [{"channel": i["channel"], "header": h} for i, h in zip(items, kept, strict=True)]


def test_port_message():
    with pytest.raises(ValueError, match="port_bits must be 64, not 128"):
        config = CONFIGS["attend-pynq-z2"]
        MemorySource(type(config)(**{**vars(config), "port_bits": 128}))
