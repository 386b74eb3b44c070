import dataclasses
import random

import pytest

from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.index_queues import IndexQueues
from nearflash.gateware.attention.engine.interfaces import RequestKind
from nearflash.sim.pysim.harness import measure_latency, run_streams
from nearflash.sim.stalls import STALLS, SimulationTimeout

CHANNELS, BUFFERS = 3, 4
CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], channels=CHANNELS, score_blocks=BUFFERS)
KEPT = ("context", "index", "block", "page", "expected", "rows", "memory", "address")


def block(rng, channel, context, number, pages=None, passes=None):
    """Requests of a block of a head whose `passes` follow from its context."""
    pages = pages or rng.randrange(1, 9)
    return [
        {
            "channel": channel,
            "request": {
                "context": context, "passes": passes or 1 + context % 3, "index": rng.getrandbits(20), "block": number,
                "page": page, "expected": pages, "row_codewords": 1 + context % 4, "rows": rng.getrandbits(8),
                "memory": rng.getrandbits(1), "address": rng.getrandbits(48),
            },
        }
        for page in range(pages)
    ]  # fmt: skip


def routed(item):
    """What becomes of an item."""
    request = item["request"]
    width = request["row_codewords"]
    codewords = sum((2**width - 1) << row * width for row in range(8) if request["rows"] >> row & 1)
    kept = {name: request[name] for name in KEPT}
    return {"channel": item["channel"], "request": {**kept, "kind": RequestKind.INDEX, "codewords": codewords}}


def of_channel(items, channel):
    return [item for item in items if item["channel"] == channel]


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("delay", [1, 90])
def test_every_request_once_and_a_channels_in_order(credited, stalls, delay):
    rng = random.Random(delay)
    items = [item for number in range(24) for item in block(rng, rng.randrange(CHANNELS), rng.randrange(20), number)]
    got = run_streams(
        credited(IndexQueues(CONFIG), delay, CHANNELS), {"i": items}, {"o": len(items)}, stalls=stalls, seed=2
    )["o"]
    for channel in range(CHANNELS):
        assert of_channel(got, channel) == [routed(item) for item in of_channel(items, channel)]


@pytest.mark.parametrize("passes, blocks", [(1, 4), (2, 2), (3, 1), (4, 1)])
def test_a_block_takes_a_buffer_for_each_pass(passes, blocks):
    items = [item for number in range(6) for item in block(random.Random(1), 1, 9, number, 3, passes)]
    got = run_streams(IndexQueues(CONFIG), {"i": items}, {"o": 3 * blocks}, hold={"room": 0b111}, quiet_cycles=100)
    assert got["o"] == [routed(item) for item in items[: 3 * blocks]]


def test_a_channel_without_buffers_holds_back_no_other():
    rng = random.Random(2)
    ahead = [item for number in range(2 * BUFFERS) for item in block(rng, 0, 1, number, 5, 1)]
    behind = [item for channel in (1, 2) for item in block(rng, channel, 1, 0, 5, 1)]
    got = run_streams(
        IndexQueues(CONFIG), {"i": ahead + behind}, {"o": 5 * BUFFERS + 10}, hold={"room": 0b111}, quiet_cycles=100
    )["o"]
    assert of_channel(got, 0) == [routed(item) for item in ahead[: 5 * BUFFERS]]
    assert sorted(int(item.channel) for item in got if item.channel) == [1] * 5 + [2] * 5


def test_a_channel_without_room_is_passed_over():
    rng = random.Random(3)
    items = [item for channel in (2, 1, 0) for item in block(rng, channel, 3, 0, 4, 1)]
    got = run_streams(IndexQueues(CONFIG), {"i": items}, {"o": 8}, hold={"room": 0b011}, quiet_cycles=100)["o"]
    assert not of_channel(got, 2)


def test_a_full_queue_holds_its_source():
    items = block(random.Random(4), 1, 3, 0, IndexQueues.PLACES + 1, 1)
    with pytest.raises(SimulationTimeout, match=f"i waits for ready: {IndexQueues.PLACES} of {len(items)} sent"):
        run_streams(IndexQueues(CONFIG), {"i": items}, {"o": 0}, hold={"room": 0b101}, timeout_cycles=1000)
    got = run_streams(IndexQueues(CONFIG), {"i": items}, {"o": len(items)}, hold={"room": 0b111})
    assert got["o"] == [routed(item) for item in items]


def test_latency():
    """Three channels are looked at in turn, from 0 on, a cycle each: channel 0 again in cycle 3."""
    spacer = block(random.Random(5), 0, 1, 0, 1, 1)
    cycles = [
        measure_latency(IndexQueues(CONFIG), {"i": [{**spacer[0], "channel": channel}]}, hold={"room": 0b111})
        for channel in range(CHANNELS)
    ]
    assert min(cycles) == IndexQueues.LATENCY
    assert max(cycles) == IndexQueues.LATENCY + CHANNELS - 1
