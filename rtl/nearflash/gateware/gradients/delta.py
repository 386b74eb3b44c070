"""Delta packer: what an update changes in its low-precision copy, compacted to a delta's words as groups come.

             ┌─ compare, rank ─► banks of (index, word), twice ─┐
    i (old, new) ┤                                                  ├─► tile word, indices, words ─► o, o_command
             └─ all new words, twice ───────────────────────────┘          └─ Crc32c, then again

A tile is kept whole, as its word, which has its count and its checksum, comes first. It goes through the checksum, and
then out, while the next one comes: tiles of which more than a quarter changes as all their words, others as pairs.

Contract: a command takes the groups of `params` parameters, old and new words, and gives the tiles of their delta
(nearflash.abi.delta), each behind a command with its place, and at last its header, the place of which is 0. Lanes
of the last group past the parameters are not looked at. Reset drops what is inside.

Timing: the command of a tile whose sections have n words comes LATENCY + n cycles after its last group; one group a
cycle, but for a tile of n words after the one before when its groups are fewer than 2 n + 7: dense ones at
W = 4; back-pressure: yes.
Numerics: exact; equals nearflash.model.gradients.delta to the bit.
Limits: words of 16 bits; 2^32 - 1 parameters.
"""

from typing import Any, NamedTuple

from amaranth import C, Cat, Module, Mux, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearflash.abi.delta import DENSE, DENSE_ABOVE, MAGIC, VERSION
from nearflash.abi.topk import HEADER_BYTES, TILE_BITS, WORD_BYTES, ValueFormat
from nearflash.gateware.coding.crc import Crc32c

__all__ = ["DeltaCommand", "DeltaPacker", "DeltaPart"]

_BANKS = 4
"""16-bit elements of a word."""
_BANK_BITS, _LIST_BITS = _BANKS.bit_length() - 1, (DENSE_ABOVE * _BANKS).bit_length() - 1
"""Bits that a place has more than the address of four words, than that of four pairs: a tile of more is dense."""
_HEADER_WORDS = HEADER_BYTES // WORD_BYTES


class DeltaCommand(data.Struct):
    """A delta of `params` parameters, at least 1, in words of a format."""

    params: 32
    value_format: ValueFormat


class DeltaPart(data.Struct):
    """The next `words` words belong to place `first`, in words, of the delta; `last`: the last tile, or the header."""

    first: 32
    words: 16
    last: 1


class DeltaPacker(wiring.Component):
    """Packs deltas.

    Parameters
    ----------
    lanes : parameters a cycle (W): 1, 2 or 4.
    tile_bits : log2 of the parameters of a tile, at least 4: fewer than a delta's for a proof alone.

    Members
    -------
    i_command : In stream of DeltaCommand; its payload must stay as it is until `idle`.
    i : In stream of struct {old: W words, new: W words, last: 1}.
    o_command : Out stream of DeltaPart. o : Out stream of 64-bit words, those of a part behind its command.
    idle : Out, the last command's header was taken.

    Raises
    ------
    ValueError : another number of lanes.
    """

    #: Cycles from a tile's last group to its command, beside one for each word of its sections.
    LATENCY = 6

    def __init__(self, lanes: int, tile_bits: int = TILE_BITS) -> None:
        if lanes not in (1, 2, 4):
            raise ValueError(f"lanes must be 1, 2 or 4, not {lanes!r}")
        self.lanes, self.tile_bits = lanes, tile_bits
        words = data.ArrayLayout(16, lanes)
        super().__init__(
            {
                "i_command": In(stream.Signature(DeltaCommand)),
                "i": In(stream.Signature(data.StructLayout({"old": words, "new": words, "last": 1}))),
                "o_command": Out(stream.Signature(DeltaPart)),
                "o": Out(stream.Signature(64)),
                "idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        """Two halves of each memory: one is filled while the other is sent."""
        m = Module()
        kept = _Kept(m, self.lanes, self.tile_bits)
        running = Signal()
        m.d.comb += [self.idle.eq(~running), self.i_command.ready.eq(~running)]
        self._fill(m, kept, running)
        self._send(m, kept, running)
        return m

    def _fill(self, m: Module, kept: "_Kept", running: Signal) -> None:
        """Cycle 0: compare a group. Cycle 1: rank what changes of it. Cycle 2: write both.

        A half is looked at in cycle 0, but full from cycle 2 on: a tile has groups enough between two of one half.
        """
        lanes, params = self.lanes, self.i_command.payload.params
        half, place, ended = Signal(), Signal(self.tile_bits), Signal()
        taken, whole, tail = Signal(), Signal(lanes), Signal(range(lanes + 1))
        group = self.i.payload
        m.d.comb += [
            self.i.ready.eq(running & ~ended & ~kept.full.bit_select(half, 1)),
            taken.eq(self.i.valid & self.i.ready),
            tail.eq(params % lanes),
            whole.eq(Mux(group.last & (tail != 0), (1 << tail) - 1, -1)),
        ]
        compared = Signal(_comparison(lanes, self.tile_bits))
        end = group.last | (place == (1 << self.tile_bits) - lanes)
        m.d.sync += [
            compared.valid.eq(taken),
            compared.changed.eq(
                Cat(whole[lane] & (group.old[lane] != group.new[lane]) for lane in range(lanes))
                & taken.replicate(lanes)
            ),
            compared.new.eq(group.new),
            compared.place.eq(place),
            compared.half.eq(half),
            compared.end.eq(end),
            compared.last.eq(group.last),
        ]
        with m.If(taken):
            m.d.sync += [place.eq(place + lanes), ended.eq(group.last)]
            with m.If(end):
                m.d.sync += [place.eq(0), half.eq(~half)]
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += [running.eq(1), ended.eq(0)]
        self._rank(m, kept, compared)

    def _rank(self, m: Module, kept: "_Kept", compared: Any) -> None:
        lanes, count = self.lanes, Signal(self.tile_bits + 1)
        behind = Signal.like(count)
        m.d.comb += behind.eq(count + sum(compared.changed))
        # Data behind the register of `compared`, of the cycle in which it is written.
        placed = Signal.like(compared)
        m.d.sync += placed.eq(compared)
        kept.put_group(m, placed.valid, placed.half, placed.place, placed.new)
        for lane in range(lanes):
            rank, ranked, listed = Signal.like(count), Signal.like(count), Signal(name=f"listed_{lane}")
            m.d.comb += rank.eq(count + sum(compared.changed[:lane]))
            m.d.sync += [
                ranked.eq(rank),
                # What comes behind the longest list is of a dense tile.
                listed.eq(compared.changed[lane] & (rank < (1 << self.tile_bits) // DENSE_ABOVE)),
            ]
            kept.put_pair(m, listed, placed.half, ranked, placed.place | lane, placed.new[lane])
        with m.If(compared.valid):
            m.d.sync += count.eq(Mux(compared.end, 0, behind))
            for number in range(2):
                with m.If(compared.end & (compared.half == number)):
                    m.d.sync += [
                        kept.full[number].eq(1),
                        kept.counts[number].eq(behind),
                        kept.last[number].eq(compared.last),
                    ]

    def _send(self, m: Module, kept: "_Kept", running: Signal) -> None:
        """Each tile twice: through its checksum, and out; behind the last one the header.

        Words are in a register on their way to the checksums: each is there when it is asked for, two cycles later.
        """
        m.submodules.crc, m.submodules.heads_crc = crc, heads_crc = Crc32c(), Crc32c()
        half, at, number = Signal(), Signal(self.tile_bits - _BANK_BITS + 1), Signal(32 - self.tile_bits)
        total, first = Signal(32), Signal(32, init=_HEADER_WORDS)  # words changed; place of the next, of 64 bits
        out, step = Signal(), Signal()  # the second time; a word is done with
        tile = _Tile(m, kept, half, self.i_command.payload.params, self.tile_bits)
        word, ahead, summed = Signal(64), Signal.like(at), Signal(64)
        of_tile, of_heads, begins = Signal(), Signal(), Signal()
        m.d.sync += [
            at.eq(ahead),
            summed.eq(word),
            crc.enable.eq(of_tile),
            crc.first.eq(begins),
            heads_crc.enable.eq(of_heads),
            heads_crc.first.eq(number == 0),
        ]
        m.d.comb += [
            ahead.eq(at),
            step.eq(~out | self.o.ready),
            self.o.payload.eq(word),
            crc.data.eq(summed),
            heads_crc.data.eq(summed),
        ]
        kept.read(m, ahead[:-1], half)
        left = _Left(m, self.tile_bits)
        flow = _Flow(at, ahead, out, step, word, of_tile, left)
        with m.FSM():
            with m.State("WAIT-TILE"):
                m.d.comb += ahead.eq(0)
                with m.If(running & kept.full.bit_select(half, 1)):
                    m.next = "SIZE-TILE"
            with m.State("SIZE-TILE"):  # of its count, which stands in a register now
                m.next = "TILE-WORD"
            self._command(m, tile, out, first, total)
            with m.State("TILE-WORD"):
                m.d.comb += [
                    begins.eq(1),
                    self.o.valid.eq(out),
                    word.eq(Cat(number, C(0, self.tile_bits), tile.head)),
                    left.ahead.eq(tile.values),
                ]
                with m.If(out):
                    m.d.comb += [word.eq(Cat(tile.head, crc.o)), of_heads.eq(step)]
                m.d.comb += of_tile.eq(~out)
                with m.If(step):
                    m.next = "INDICES"
                    with m.If(tile.dense):
                        m.next = "WORDS"
                    with m.Elif(tile.values == 0):
                        self._end(m, kept, tile, half, number, out)
            self._section(m, "INDICES", tile, flow, kept.pair_words(0))
            self._section(m, "WORDS", tile, flow, Mux(tile.dense, kept.group_words(), kept.pair_words(1)))
            with m.State("TILE-END"):
                self._end(m, kept, tile, half, number, out)
            self._header(m, (number, total, first, heads_crc.o), running)

    def _command(self, m: Module, tile: "_Tile", out: Signal, first: Signal, total: Signal) -> None:
        """Between the two times: the tile's place and words."""
        command = self.o_command.payload
        with m.State("COMMAND"):
            m.d.comb += [self.o_command.valid.eq(1), command.words.eq(tile.words), command.last.eq(tile.last)]
            m.d.comb += command.first.eq(first)
            with m.If(self.o_command.ready):
                m.d.sync += [out.eq(1), first.eq(first + tile.words), total.eq(total + tile.values)]
                m.next = "TILE-WORD"

    def _section(self, m: Module, name: str, tile: "_Tile", flow: "_Flow", shown: Any) -> None:
        """A state for words of four elements: those past the last one are zero."""
        with m.State(name):
            m.d.comb += [self.o.valid.eq(flow.out), flow.of_tile.eq(~flow.out)]
            for lane in range(_BANKS):
                with m.If(flow.left.there[lane]):
                    m.d.comb += flow.word.word_select(lane, 16).eq(shown[16 * lane : 16 * lane + 16])
            with m.If(flow.step):
                m.d.comb += [flow.ahead.eq(flow.at + 1), flow.left.ahead.eq(flow.left.now - _BANKS)]
                with m.If(flow.left.final):
                    m.d.comb += [flow.ahead.eq(0), flow.left.ahead.eq(tile.values)]
                    m.next = "WORDS" if name == "INDICES" else "TILE-END"

    def _end(self, m: Module, kept: "_Kept", tile: "_Tile", half: Signal, number: Signal, out: Signal) -> None:
        """After a tile's last word: its command comes, or the next tile, or the header."""
        m.next = "COMMAND"
        with m.If(out):
            m.d.sync += [out.eq(0), half.eq(~half), number.eq(number + 1)]
            for index in range(2):
                with m.If(half == index):
                    m.d.sync += kept.full[index].eq(0)
            m.next = "WAIT-TILE"
            with m.If(tile.last):
                m.next = "HEADER-CRC"

    def _header(self, m: Module, fields: tuple[Any, ...], running: Signal) -> None:
        """Its checksum is over seven halves of words."""
        number, total, first, heads_crc = fields
        m.submodules.header_crc = crc = Crc32c(32)
        payload, part = self.i_command.payload, Signal(3)
        start = int.from_bytes(MAGIC, "little") | VERSION << 32
        form = Cat(payload.value_format, C(0, 6))
        halves = Cat(
            C(start, 48), form, C(self.tile_bits, 8), payload.params, number, C(0, self.tile_bits), total,
            (first << 3)[:32], heads_crc, crc.o,
        )  # fmt: skip
        summed = Signal()
        m.d.sync += [crc.data.eq(halves.word_select(part, 32)), crc.first.eq(part == 0), crc.enable.eq(summed)]
        with m.State("HEADER-CRC"):
            m.d.comb += summed.eq(1)
            m.d.sync += part.eq(part + 1)
            with m.If(part == 2 * _HEADER_WORDS - 2):
                m.d.sync += part.eq(0)
                m.next = "HEADER-COMMAND"
        with m.State("HEADER-COMMAND"):
            part_out = self.o_command.payload
            m.d.comb += [self.o_command.valid.eq(1), part_out.words.eq(_HEADER_WORDS), part_out.last.eq(1)]
            with m.If(self.o_command.ready):
                m.next = "HEADER"
        with m.State("HEADER"):
            m.d.comb += [self.o.valid.eq(1), self.o.payload.eq(halves.word_select(part[:2], 64))]
            with m.If(self.o.ready):
                m.d.sync += part.eq(part + 1)
                with m.If(part == _HEADER_WORDS - 1):
                    m.d.sync += [part.eq(0), number.eq(0), total.eq(0), first.eq(_HEADER_WORDS), running.eq(0)]
                    m.next = "WAIT-TILE"


class _Tile:
    """The tile in a half: its size, what is sent of it, and the first half of its word.

    Cycle 1 of a half: its count and size. Cycle 2: `dense`, `values`. Cycle 3: `words`, its own one among them.
    """

    def __init__(self, m: Module, kept: "_Kept", half: Signal, params: Any, tile_bits: int) -> None:
        bits = tile_bits + 1
        count, size = Signal(bits, name="tile_count"), Signal(bits, name="tile_size")
        self.last, self.dense = Signal(name="tile_last"), Signal(name="tile_dense")
        self.values = Signal(bits, name="tile_values")
        self.words = Signal(bits, name="tile_words")
        part, dense = params[:tile_bits], count * DENSE_ABOVE > size
        m.d.comb += self.last.eq(kept.last.bit_select(half, 1))
        m.d.sync += [
            count.eq(Mux(half, kept.counts[1], kept.counts[0])),
            size.eq(Mux(self.last & (part != 0), part, 1 << tile_bits)),
            self.dense.eq(dense),
            self.values.eq(Mux(dense, size, count)),
            self.words.eq(Mux(self.dense, (self.values + 2 * _BANKS - 1) >> 2, Cat(C(1, 1), (self.values + 3) >> 2))),
        ]
        self.head = Cat(self.values, C(0, 16 - bits), Mux(self.dense, C(DENSE, 16), C(0, 16)))


class _Left:
    """Elements of a section that are left, which of a word's four they are, and whether there are no more."""

    def __init__(self, m: Module, tile_bits: int) -> None:
        self.now, self.ahead = Signal(tile_bits + 2, name="left"), Signal(tile_bits + 2, name="left_ahead")
        self.there, self.final = Signal(_BANKS, name="left_there"), Signal(name="left_final")
        m.d.comb += self.ahead.eq(self.now)
        m.d.sync += [
            self.now.eq(self.ahead),
            self.there.eq(Cat(self.ahead > lane for lane in range(_BANKS))),
            self.final.eq(self.ahead <= _BANKS),
        ]


class _Flow(NamedTuple):
    """Words on their way: the place read now and next, the second time, a word is done with, the word, for the sum."""

    at: Signal
    ahead: Signal
    out: Signal
    step: Signal
    word: Signal
    of_tile: Signal
    left: "_Left"


def _comparison(lanes: int, tile_bits: int) -> data.StructLayout:
    """A group that was compared: which words changed, and where it belongs."""
    return data.StructLayout({"valid": 1, "changed": lanes, "new": data.ArrayLayout(16, lanes), "place": tile_bits,
                              "half": 1, "end": 1, "last": 1})  # fmt: skip


class _Kept:
    """Two tiles: all their new words, and pairs of those that changed, in banks that a group writes at once."""

    def __init__(self, m: Module, lanes: int, tile_bits: int) -> None:
        self._lanes, self._list_bits = lanes, tile_bits - _LIST_BITS
        self.full, self.last = Signal(2, name="kept_full"), Signal(2, name="kept_last")
        self.counts = [Signal(tile_bits + 1, name=f"kept_count_{half}") for half in range(2)]
        pair = data.StructLayout({"index": 16, "word": 16})
        self._pairs = [self._memory(m, f"pairs_{bank}", pair, self._list_bits) for bank in range(_BANKS)]
        self._words = [self._memory(m, f"words_{bank}", 16, tile_bits - _BANK_BITS) for bank in range(_BANKS)]

    @staticmethod
    def _memory(m: Module, name: str, shape: Any, address_bits: int) -> tuple[Any, Any]:
        m.submodules[name] = memory = Memory(shape=shape, depth=2 << address_bits, init=[])
        return memory.write_port(), memory.read_port()

    def put_pair(self, m: Module, enable: Any, half: Signal, rank: Any, index: Any, word: Any) -> None:
        """A pair of the place `rank`: four that follow one another go to four banks."""
        for bank, (write, _) in enumerate(self._pairs):
            with m.If(enable & (rank[:2] == bank)):
                m.d.comb += [write.en.eq(1), write.addr.eq(Cat(rank[2 : 2 + self._list_bits], half))]
                m.d.comb += [write.data.index.eq(index), write.data.word.eq(word)]

    def put_group(self, m: Module, enable: Any, half: Signal, place: Signal, words: Any) -> None:
        """New words from `place` of a tile on."""
        for bank, (write, _) in enumerate(self._words):
            here = enable & (place[:2] == bank // self._lanes * self._lanes)
            m.d.comb += [
                write.en.eq(here),
                write.addr.eq(Cat(place[2:], half)),
                write.data.eq(words[bank % self._lanes]),
            ]

    def read(self, m: Module, address: Any, half: Signal) -> None:
        """Show the words of this address from the next cycle on."""
        for _, port in self._pairs:
            m.d.comb += port.addr.eq(Cat(address[: self._list_bits], half))
        for _, port in self._words:
            m.d.comb += port.addr.eq(Cat(address, half))

    def pair_words(self, part: int) -> Any:
        """Indices (part 0) or words of four pairs."""
        return Cat(port.data.as_value()[16 * part : 16 * part + 16] for _, port in self._pairs)

    def group_words(self) -> Any:
        """Four new words."""
        return Cat(port.data for _, port in self._words)
