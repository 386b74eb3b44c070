import random
from functools import cache

import numpy as np
import pytest
from amaranth.lib import data

from nearflash.abi.attention.faults import Fault
from nearflash.abi.attention.fixed_point import SCORE_LSB
from nearflash.abi.attention.pages import IndexFormat, IndexLayout, TokenLayout
from nearflash.abi.formats import fp32_bits
from nearflash.abi.kernel.config import AttendConfig
from nearflash.gateware.attention.engine.engine import ChannelEngine
from nearflash.gateware.attention.engine.interfaces import (
    ContextRecord,
    Done,
    DrainCommand,
    GatherWrite,
    PageHeader,
    Partial,
    RequestKind,
    ScoreRow,
    query_write,
)
from nearflash.gateware.attention.numerics.product import OPERAND
from nearflash.gateware.nand.interfaces import CodewordBeat
from nearflash.model.attention.gather import gather
from nearflash.model.attention.memory.index import quantise
from nearflash.model.attention.numerics.dot import dot_truncated
from nearflash.model.attention.numerics.product import fp16_operand, multiply_rounded
from nearflash.sim.stalls import STALLS
from nearflash.sim.verilator.ports import integers_from_words, words_from_integers
from nearflash.sim.verilator.streams import StreamUnit
from nearflash.verify.fixtures.ordered import Ordered

PAGE_BYTES, WORDS = 4096, 8
SMALL = AttendConfig("small", channels=1, heads_per_beat=1, contexts=4, gather_slots=4, query_rows=1024, score_blocks=8,
                     score_entries=1024, selector_keys=256, luns=0, page_bytes=PAGE_BYTES, clock_hz=1)  # fmt: skip
WIDE = AttendConfig("wide", channels=1, heads_per_beat=4, contexts=4, gather_slots=4, query_rows=1024, score_blocks=4,
                    score_entries=1024, selector_keys=256, luns=0, page_bytes=PAGE_BYTES, clock_hz=1)  # fmt: skip


class Traffic:
    """What a channel engine gets, by stream, and what it must give."""

    def __init__(self, heads, seed):
        self.heads, self.rng, self.numbers = heads, random.Random(seed), np.random.default_rng(seed)
        names = ("i_context", "i_query", "i_gather", "i_page", "i", "i_drain")
        self.inputs = {name: [] for name in names}
        self.partials, self.dones, self.scores = [], [], []
        self.requests, self.expected_scores = [], {}

    def fp16(self, *shape, scale=1.0):
        return (self.numbers.standard_normal(shape) * scale).astype(np.float16)

    def words(self, array):
        return np.ascontiguousarray(array).view(np.uint64).ravel().tolist()

    def context(self, context, *, dim, tokens, interleaved, group, scale=0.1, channels=None, index=None):
        """Broadcast a context and its q; returns q."""
        turns = -(-group // self.heads)
        q = self.fp16(group, dim)
        record = {
            "context": context, "query_base": 256 * context, "dim_rows": dim // 4, "group": group,
            "group_tokens": tokens, "interleaved": interleaved, "page_codewords": PAGE_BYTES // 512,
            "scale": fp32_bits(scale),
            "limit_shift": (len(channels) - 1).bit_length() if channels is not None else 0,
        }  # fmt: skip
        if index:
            record |= {"block_tokens": index.block_tokens, "index_format": index.format, "index_rows": index.rows,
                       "row_codewords": index.row_codewords}  # fmt: skip
        self.inputs["i_context"].append(record)
        chosen = np.zeros(dim, bool)
        chosen[channels if channels is not None else slice(0)] = True
        bits = np.zeros((turns * self.heads, dim), np.uint16)
        bits[:] = self.numbers.integers(0, 1 << 16, bits.shape)  # rows of heads that do not exist hold anything
        bits[:group] = q.view(np.uint16)
        for turn in range(turns):
            for row in range(dim // 4):
                part = bits[turn * self.heads : (turn + 1) * self.heads, 4 * row : 4 * row + 4]
                selected = sum(int(chosen[4 * row + j]) << j for j in range(4))
                address = 256 * context + turn * (dim // 4) + row
                values = [
                    [OPERAND.from_bits(one) for one in row] for row in fp16_operand(part.view(np.float16)).tolist()
                ]
                self.inputs["i_query"].append({"address": address, "values": values, "selected": selected})
        return q

    def page(self, header, codewords, flags=()):
        """One request's header and beats; `codewords`: number -> 64 words."""
        beats = []
        for _, words in sorted(codewords.items()):
            state = {"uncorrectable": int("uncorrectable" in flags), "misdirected": int("misdirected" in flags)}
            every = [self.rng.getrandbits(64), *words] if len(words) == 64 else list(words)
            beats += [{"data": w, "first": i == 0, "last": i == 64, **state} for i, w in enumerate(every)]
        self.requests.append(({**header, "codewords": sum(1 << n for n in codewords)}, beats))

    def tokens(self, layout, k, v, wanted, *, values):
        """Codewords that hold the wanted tokens of a group."""
        image = self.numbers.integers(0, 1 << 64, layout.pages * PAGE_BYTES // 8, np.uint64)
        for token in range(len(k)):
            for value, source in ((False, k), (True, v)):
                start, end = layout.span(token, value=value)
                image[start // 8 : end // 8] = self.words(source[token])
        numbers = {
            number
            for token in wanted
            for value in ((False, True) if values else (False,))
            for start, end in [layout.span(token, value=value)]
            for number in range(start // 512, (end - 1) // 512 + 1)
        }
        return {number: image[64 * number : 64 * number + 64].tolist() for number in numbers}

    def gather(self, context, slot, *, dim, tokens, interleaved, group, requests, scale=0.1, drain=True):
        """A head's gather over some token groups, and its partial sums."""
        q = self.context(context, dim=dim, tokens=tokens, interleaved=interleaved, group=group, scale=scale)
        layout = TokenLayout(PAGE_BYTES, dim, tokens, interleaved)
        references = tuple(self.rng.randint(-2, 2) for _ in range(group))
        self.inputs["i_gather"].append(
            {"context": context, "slot": slot, "references": [*references, *[0] * (8 - group)]}
        )
        keys, values = [], []
        for index in range(requests):
            k, v = self.fp16(tokens, dim), self.fp16(tokens, dim)
            wanted = sorted(self.rng.sample(range(tokens), self.rng.randint(1, tokens)))
            header = {"context": context, "kind": RequestKind.GATHER, "index": index,
                      "rows": sum(1 << token for token in wanted)}  # fmt: skip
            self.page(header, self.tokens(layout, k, v, wanted, values=True))
            keys.append(k[wanted])
            values.append(v[wanted])
            self.dones.append({"context": context, "kind": RequestKind.GATHER, "faults": 0})
        if not drain:
            return
        model = gather(q, np.concatenate(keys), np.concatenate(values), scale, references)
        assert not model.faults & ~Fault.REFERENCE_LOW
        self.inputs["i_drain"].append({"slot": slot, "group": group, "dim_rows": dim // 4})
        self.partials += [(int(model.denominator[h]), model.maximum[h]) for h in range(group)]
        self.partials += [(int(one), None) for row in model.numerator for one in row]

    def scan(self, context, *, dim, channels, block, blocks, tokens, interleaved, group, form):
        """A head's index requests and its tail, and their scores by token."""
        chosen = np.sort(self.numbers.choice(dim, channels, replace=False))
        index = IndexLayout(PAGE_BYTES, dim, block, form)
        layout = TokenLayout(PAGE_BYTES, dim, tokens, interleaved)
        q = self.context(context, dim=dim, tokens=tokens, interleaved=interleaved, group=group, channels=chosen,
                         index=index)  # fmt: skip
        total = block * blocks + tokens + tokens // 2
        k = self.fp16(total, dim)
        scores = []
        for number in range(blocks):
            part = k[number * block : (number + 1) * block]
            rows, codes = index_image(index, part)
            pages = sorted({c // index.rows for c in chosen})
            for page in pages:
                local = [int(c) % index.rows for c in chosen if c // index.rows == page]
                header = {"context": context, "kind": RequestKind.INDEX, "index": number * index.pages + page,
                          "block": number, "page": page, "expected": len(pages),
                          "rows": sum(1 << row for row in local)}  # fmt: skip
                words = {
                    row * index.row_codewords + piece: rows[page * index.rows + row][piece]
                    for row in local
                    for piece in range(index.row_codewords)
                }
                self.page(header, words)
            scores.append(approximate(q[:, chosen], part[:, chosen], form, codes, chosen))
            self.dones.append({"context": context, "kind": RequestKind.INDEX, "faults": 0})
        for start in range(block * blocks, total, tokens):
            part = k[start : start + tokens]
            wanted = range(len(part))
            header = {"context": context, "kind": RequestKind.TAIL, "index": start // tokens,
                      "rows": (1 << len(part)) - 1}  # fmt: skip
            self.page(header, self.tokens(layout, part, part, wanted, values=False))
            scores.append(np.stack([dot_truncated(part[:, chosen], q[h, chosen]) for h in range(group)]))
            self.dones.append({"context": context, "kind": RequestKind.TAIL, "faults": 0})
        self.expected_scores[context] = (np.concatenate(scores, axis=1), tokens)
        padded = -(-total // tokens) * tokens
        self.scores += [None] * (padded // 4 * group)

    def check_scores(self, got):
        """Every token's score once, groups in the order of ScoreRow."""
        seen = {context: np.full(scores.shape, -(1 << 60)) for context, (scores, _) in self.expected_scores.items()}
        for item in got["o_score"]:
            for lane in range(4):
                if item.valid >> lane & 1:
                    seen[item.context][item.head, 4 * item.row + lane] = item.scores[lane]
        for context, (scores, tokens) in self.expected_scores.items():
            np.testing.assert_array_equal(seen[context], scores)
            rows = [(i.row // (tokens // 4), i.head, i.row, i.last) for i in got["o_score"] if i.context == context]
            groups = {}
            for group, head, row, last in rows:
                groups.setdefault(group, []).append((head, row, last))
                assert last == (row % (tokens // 4) == tokens // 4 - 1)
            assert all(items == sorted(items) for items in groups.values())
        kinds = sorted((d.context, int(d.kind.value), d.faults) for d in got["o_done"])
        assert kinds == sorted((d["context"], d["kind"].value, d["faults"]) for d in self.dones)

    def run(self, unit, stalls="none", *, shuffle=True):
        """Send all; requests of different heads interleave."""
        if shuffle:
            self.rng.shuffle(self.requests)
        self.inputs["i_page"] = [header for header, _ in self.requests]
        self.inputs["i"] = [beat for _, beats in self.requests for beat in beats]
        shapes = {"i_context": ContextRecord, "i_query": query_write(self.heads), "i_gather": GatherWrite,
                  "i_page": PageHeader, "i": CodewordBeat, "i_drain": DrainCommand}  # fmt: skip
        inputs = {name: packed(shapes[name], items) for name, items in self.inputs.items()}
        outputs = {"o_partial": len(self.partials), "o_done": len(self.dones), "o_score": len(self.scores)}
        hold = {f"i_page_after_{name}": len(self.inputs[name]) for name in ("i_context", "i_query", "i_gather")}
        hold["i_drain_after_o_done"] = len(self.dones)
        got = unit.run(inputs, outputs, stalls=stalls, seed=3, hold=hold)
        return {name: unpacked(shape, got[name]) for name, shape in
                {"o_partial": Partial, "o_done": Done, "o_score": ScoreRow}.items()}  # fmt: skip


def index_image(layout, k):
    """Codewords of each channel's row, 65 words each with the aux; and the quantised block."""
    form, block = layout.format, None
    if form is IndexFormat.FP16:
        data_rows = np.ascontiguousarray(k.T).view(np.uint8)
        aux = [0] * len(data_rows)
    else:
        block = quantise(k, form)
        data_rows = block.rows()
        aux = (block.zero.view(np.uint16).astype(np.uint64) << np.uint64(16) | block.scale.view(np.uint16)).tolist()
    image = np.full((len(data_rows), layout.stride_bytes), 0xA5, np.uint8)
    image[:, : data_rows.shape[1]] = data_rows
    words = image.view(np.uint64).reshape(len(image), layout.row_codewords, 64)
    rows = [
        [[head | 0xDEAD_7C00 << 32, *piece.tolist()] for piece in row] for head, row in zip(aux, words, strict=True)
    ]
    return rows, block


def approximate(q, k, form, block, chosen):
    """Scores (g, T) of the chosen channels (docs/contracts/attention.md, 1)."""
    if form is IndexFormat.FP16:
        return np.stack([dot_truncated(k, one) for one in q])
    scale, zero, lsb = block.scale[chosen], block.zero[chosen], -14 if form is IndexFormat.INT8 else -10
    factors, offsets = multiply_rounded(q, scale, lsb), multiply_rounded(q, zero, SCORE_LSB)
    return (factors @ block.codes[:, chosen].T.astype(np.int64) << lsb - SCORE_LSB) + offsets.sum(1, keepdims=True)


def packed(shape, items):
    layout = data.Layout.cast(shape)
    values = [layout.const(item).as_bits() for item in items]
    return words_from_integers(values, layout.size) if values and layout.size > 64 else values


def unpacked(shape, items):
    layout = data.Layout.cast(shape)
    values = integers_from_words(items) if layout.size > 64 else [int(item) for item in items]
    return [layout.from_bits(value) for value in values]


@cache
def built(config):
    after = {"i_page": ["i_context", "i_query", "i_gather"], "i_drain": ["o_done"]}
    return StreamUnit(Ordered(ChannelEngine(config), after), f"engine-{config.name}")


def unit_of(config):
    """A new engine, Verilated; pages wait for the broadcasts, drains for all that is done."""
    unit = built(config)
    unit.reset_model()
    return unit


def check(got, traffic):
    """Everything that came is what the model says."""
    for number, (item, (total, maximum)) in enumerate(zip(got["o_partial"], traffic.partials, strict=True)):
        assert item.sum == total, number
        assert maximum is None or item.maximum == maximum
    traffic.check_scores(got)


def gathers(traffic, group):
    traffic.gather(0, 0, dim=64, tokens=16, interleaved=False, group=group, requests=3)
    traffic.gather(1, 1, dim=80, tokens=12, interleaved=True, group=group, requests=3)
    traffic.gather(2, 2, dim=128, tokens=8, interleaved=True, group=group, requests=3)
    traffic.gather(3, 3, dim=256, tokens=4, interleaved=True, group=group, requests=2)


def scans(traffic, group, form):
    shape = {"group": group, "form": form}
    traffic.scan(0, dim=64, channels=9, block=96, blocks=2, tokens=12, interleaved=True, **shape)
    traffic.scan(1, dim=80, channels=5, block=512, blocks=1, tokens=16, interleaved=False, **shape)


@pytest.mark.parametrize("stalls", STALLS)
def test_gather_gives_exact_sums(stalls):
    traffic = Traffic(1, 7)
    gathers(traffic, group=1)
    check(traffic.run(unit_of(SMALL), stalls), traffic)


@pytest.mark.parametrize("form", IndexFormat)
@pytest.mark.parametrize("stalls", ["none", "both"])
def test_scan_gives_approximate_scores(stalls, form):
    traffic = Traffic(1, 11)
    scans(traffic, 1, form)
    check(traffic.run(unit_of(SMALL), stalls), traffic)


@pytest.mark.parametrize(
    ("config", "group"),
    [(SMALL, 3), *(pytest.param(WIDE, group, marks=pytest.mark.full) for group in (4, 7))],
    ids=["small-3", "wide-4", "wide-7"],
)
def test_all_kinds_of_requests_interleave(config, group):
    traffic = Traffic(config.heads_per_beat, 5)
    forms = iter((IndexFormat.INT4, IndexFormat.INT8))
    for context, interleaved in ((0, True), (1, False)):
        traffic.scan(context, dim=64, channels=12, block=128, blocks=1, tokens=8, interleaved=interleaved, group=group,
                     form=next(forms))  # fmt: skip
    traffic.gather(2, 0, dim=128, tokens=8, interleaved=True, group=group, requests=4)
    traffic.gather(3, 2, dim=80, tokens=16, interleaved=False, group=group, requests=3)
    unit = unit_of(config)
    check(traffic.run(unit, "bursty"), traffic)


def test_faults_are_those_of_their_request():
    """Each fault once, in a request among others; nothing hangs, and the others have none."""
    traffic = Traffic(1, 13)
    shape = {"dim": 64, "tokens": 8, "interleaved": True, "group": 1}
    for context, scale in ((0, 0.1), (1, 0.1), (2, 200.0), (3, 0.1)):
        traffic.gather(context, context, requests=1, drain=False, scale=scale, **shape)
    for (header, beats), change in zip(
        traffic.requests, ("uncorrectable", "nonfinite", "", "misdirected"), strict=True
    ):
        if change == "nonfinite":
            token = (header["rows"] & -header["rows"]).bit_length() - 1
            place = token * 32 % 64 if token else 0  # 32 beats a token; the first codeword asked for holds it
            beats[1 + place]["data"] = 0x7C00 << 16
        elif change:
            beats[0][change] = beats[1][change] = 1
    expected = [Fault.UNCORRECTABLE, Fault.NONFINITE, Fault.REFERENCE_HIGH, Fault.MISDIRECTED]
    got = traffic.run(unit_of(SMALL), shuffle=False)
    faults = {done.context: Fault(done.faults) for done in got["o_done"]}
    assert [faults[context] for context in range(4)] == expected


def test_one_beat_a_cycle():
    traffic = Traffic(1, 17)
    traffic.gather(0, 0, dim=128, tokens=8, interleaved=True, group=1, requests=12)
    unit = unit_of(SMALL)
    check(traffic.run(unit), traffic)
    beats, drained = len(traffic.inputs["i"]), len(traffic.partials)
    assert unit.cycles < 1.05 * beats + drained + 200


def test_faults_of_scores_are_those_of_their_request():
    """In rows, in the aux beats of rows, and in a tail; the tails of the other heads have none."""
    traffic = Traffic(1, 19)
    forms = (IndexFormat.FP16, IndexFormat.INT8, IndexFormat.FP16, IndexFormat.INT4)
    for context, form in enumerate(forms):
        traffic.scan(context, dim=64, channels=9, block=96, blocks=1, tokens=8, interleaved=True, group=1, form=form)
    changes = {  # context, kind: word that replaces data (0) or aux (1)
        (0, RequestKind.INDEX): (0, 0x7BFF * 0x0001_0001_0001_0001, Fault.SCORE_RANGE),
        (1, RequestKind.INDEX): (1, 0x7BFF, Fault.SCORE_RANGE),
        (2, RequestKind.TAIL): (0, 0x7C00 * 0x0001_0001_0001_0001, Fault.NONFINITE),
        (3, RequestKind.INDEX): (1, 0x7C00, Fault.NONFINITE),
    }
    for header, beats in traffic.requests:
        first, word, _ = changes.get((header["context"], header["kind"]), (None, None, None))
        for beat in beats:
            if beat["first"] == first:
                beat["data"] = word
    got = traffic.run(unit_of(SMALL))
    faults = {(done.context, done.kind, done.faults) for done in got["o_done"]}
    expected = {(context, kind, changes.get((context, kind), (0, 0, 0))[2]) for context in range(4)
                for kind in (RequestKind.INDEX, RequestKind.TAIL)}  # fmt: skip
    assert faults == expected


@pytest.mark.parametrize("form", IndexFormat)
def test_rows_keep_the_lanes_busy(form):
    """A cycle for each beat of an fp16 row, two for each of the others; at most 20 more for each codeword."""
    traffic = Traffic(1, 23)
    traffic.scan(0, dim=64, channels=16, block=1024, blocks=1, tokens=8, interleaved=True, group=1, form=form)
    unit = unit_of(SMALL)
    check(traffic.run(unit), traffic)
    beats, tail = 1024 * form.bits // 64 * 16, sum(len(b) for h, b in traffic.requests if h["kind"] is RequestKind.TAIL)
    cycles = beats * (1 if form is IndexFormat.FP16 else 2) + 20 * beats // 64
    assert unit.cycles < cycles + tail + len(traffic.scores) + 200
