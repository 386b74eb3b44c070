import dataclasses
import random

import pytest

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.pages import IndexFormat, IndexLayout, PageEntry
from nearflash.abi.kernel.config import CONFIGS
from nearflash.gateware.attention.control.scan import ScanWalker
from nearflash.gateware.attention.engine.interfaces import RequestKind
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.read_memory import WithMemory

CONFIG = dataclasses.replace(CONFIGS["attend-zynq7045"], channels=3, score_blocks=2)
_WORDS = 1 << 12


@dataclasses.dataclass
class Head:
    """A head of random shape with its selected channels and its table."""

    context: int
    dim: int
    layout: IndexLayout
    blocks: int
    channels: set
    table_address: int
    passes: int
    entries: list

    @classmethod
    def random(cls, rng, context):
        layout = IndexLayout(
            rng.choice([4096, 8192, 16384]),
            dim := rng.choice([32, 64, 80, 128]),
            rng.choice([256, 512, 768, 1024]),
            rng.choice(list(IndexFormat)),
        )
        blocks = rng.randrange(4)
        head = cls(context, dim, layout, blocks, set(rng.sample(range(dim), rng.randrange(1, dim // 2))), 0, 1, [])
        for block in range(blocks):
            for _ in range(layout.pages):
                address = 8 * rng.getrandbits(20)
                nand = PageEntry(block % 3, rng.randrange(16), rng.getrandbits(32))
                head.entries.append(rng.choice([nand, PageEntry(block % 3, address=address)]))
        head.passes = rng.choice([1, 2])
        return head

    @property
    def plan(self):
        layout = self.layout
        return {
            "context": self.context, "passes": self.passes, "index_table": self.table_address, "blocks": self.blocks,
            "index_pages": layout.pages, "index_rows": layout.rows, "row_codewords": layout.row_codewords,
        }  # fmt: skip

    @property
    def mask(self):
        beats = self.dim // 4
        return [
            {"mask": sum((4 * beat + k in self.channels) << k for k in range(4)), "last": beat == beats - 1}
            for beat in range(beats)
        ]

    @property
    def requests(self):
        m, width = self.layout.rows, self.layout.row_codewords
        rows = {}
        for channel in self.channels:
            rows.setdefault(channel // m, set()).add(channel % m)
        found = []
        for index, entry in enumerate(self.entries):
            block, page = divmod(index, self.layout.pages)
            if page in rows:
                memory = entry.address is not None
                found.append(
                    {
                        "channel": entry.channel,
                        "request": {
                            "context": self.context, "kind": RequestKind.INDEX, "index": index, "block": block,
                            "page": page, "expected": len(rows), "rows": sum(1 << r for r in rows[page]),
                            "codewords": sum(1 << r * width + k for r in rows[page] for k in range(width)),
                            "memory": memory, "address": entry.address if memory else entry.lun << 32 | entry.row,
                        },
                    }
                )  # fmt: skip
        return found

    def end(self, requests, dones, faults=0):
        return {
            "context": self.context,
            "kind": RequestKind.INDEX,
            "dones": dones,
            "requests": requests,
            "faults": faults,
        }


@pytest.fixture
def run(credited):
    """Walk over the heads; blocks are done `delay` cycles after their last request."""
    return lambda heads, requests, delay=30, **options: walk(
        credited(ScanWalker(CONFIG), delay, CONFIG.channels), heads, requests, **options
    )


def walk(walker, heads, requests, **options):
    words = [0] * _WORDS
    at = 1
    for head in heads:
        head.table_address = 8 * at
        for entry in head.entries:
            words[at] = entry if isinstance(entry, int) else entry.pack()
            at += 1
    return run_streams(
        WithMemory(walker, words),
        {"i": [head.plan for head in heads], "i_mask": [beat for head in heads for beat in head.mask]},
        {"o": requests, "o_end": len(heads)},
        timeout_cycles=20_000,
        **options,
    )


def by_channel(requests):
    """Each channel's requests in order; channels do not wait for each other."""
    return [[item["request"] for item in requests if item["channel"] == channel] for channel in range(CONFIG.channels)]


@pytest.mark.parametrize("stalls", STALLS)
def test_requests_of_every_head(run, stalls):
    rng = random.Random(4)
    heads = [Head.random(rng, context) for context in range(5)]
    expected = [request for head in heads for request in head.requests]
    got = run(heads, len(expected), stalls=stalls, seed=1)
    assert by_channel(got["o"]) == by_channel(expected)
    assert got["o_end"] == [head.end(len(head.requests), head.blocks) for head in heads]


def small_head(context=0, blocks=4):
    """One page a block, all on channel 1."""
    layout = IndexLayout(4096, 8, 256, IndexFormat.FP16)
    return Head(context, 8, layout, blocks, {0, 5}, 8, 1, [PageEntry(1, 0, row) for row in range(blocks)])


def test_no_more_blocks_than_the_channel_has_buffers():
    head = small_head(blocks=3)
    words = [0, *(entry.pack() for entry in head.entries), *[0] * 4]
    got = run_streams(
        WithMemory(ScanWalker(CONFIG), words),
        {"i": [head.plan], "i_mask": head.mask}, {"o": 2, "o_end": 1}, quiet_cycles=100,
        hold={"room": 0b111},
    )  # fmt: skip
    assert len(got["o"]) == CONFIG.score_blocks


@pytest.mark.parametrize(
    "bad", [PageEntry(3), PageEntry(1, 16), PageEntry(0), PageEntry(1, address=0).pack() | 4, 1 << 44 | 1 << 48]
)
def test_a_bad_entry_ends_the_head_but_not_its_block(run, bad):
    layout = IndexLayout(4096, 32, 512, IndexFormat.FP16)  # four rows a page, eight pages a block
    entries = [PageEntry(1, 2, row) for row in range(3 * layout.pages)]
    entries[layout.pages + 3] = bad
    head, after = Head(1, 32, layout, 3, set(range(32)), 0, 1, entries), small_head(2, 1)
    whole = head.requests if not isinstance(bad, int) else dataclasses.replace(head, entries=entries[:11]).requests
    good = [*whole[:11], whole[10]]
    got = run([head, after], 17, delay=3)
    assert got["o"][:12] == good
    assert got["o"][16:] == after.requests
    assert got["o_end"] == [head.end(16, 2, Fault.ENTRY), after.end(1, 1)]


def test_a_block_with_a_bad_first_entry_is_not_begun(run):
    head, after = small_head(1), small_head(2, 1)
    head.entries[2] = PageEntry(200)
    got = run([head, after], 3)
    assert [int(item.request.index) for item in got["o"]] == [0, 1, 0]
    assert got["o_end"] == [head.end(2, 2, Fault.ENTRY), after.end(1, 1)]
