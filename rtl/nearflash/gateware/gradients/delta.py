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
cycle, but for a tile of n words after the one before when its groups are fewer than 2 n + 6: dense ones at
W = 4; back-pressure: yes.
Numerics: exact; equals nearflash.model.gradients.delta to the bit.
Limits: words of 16 bits; 2^32 - 1 parameters; for clocks of 100 MHz: 13 levels of logic from the tile that is sent to
the checksum of the tiles' words, where a lane has 8. `update-smartssd-delta` is not at 300 MHz yet.
"""

from typing import Any

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
    LATENCY = 4

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
        """Compare a group, and write it and what changes of it."""
        lanes, params = self.lanes, self.i_command.payload.params
        half, place, count, ended = Signal(), Signal(self.tile_bits), Signal(self.tile_bits + 1), Signal()
        taken, whole, tail = Signal(), Signal(lanes), Signal(range(lanes + 1))
        group = self.i.payload
        m.d.comb += [
            self.i.ready.eq(running & ~ended & ~kept.full.bit_select(half, 1)),
            taken.eq(self.i.valid & self.i.ready),
            tail.eq(params % lanes),
            whole.eq(Mux(group.last & (tail != 0), (1 << tail) - 1, -1)),
        ]
        rank: Any = count
        for lane in range(lanes):
            changed = Signal(name=f"changed_{lane}")
            m.d.comb += changed.eq(taken & whole[lane] & (group.old[lane] != group.new[lane]))
            # What comes behind the longest list is of a dense tile.
            kept.put_pair(
                m, changed & (rank < (1 << self.tile_bits) // DENSE_ABOVE), half, rank, place | lane, group.new[lane]
            )
            behind = Signal.like(count, name=f"behind_{lane}")
            m.d.comb += behind.eq(rank + changed)
            rank = behind
        kept.put_group(m, taken, half, place, group.new)
        with m.If(taken):
            m.d.sync += [place.eq(place + lanes), count.eq(rank), ended.eq(group.last)]
            with m.If(group.last | (place == (1 << self.tile_bits) - lanes)):
                m.d.sync += [place.eq(0), count.eq(0), half.eq(~half)]
                for number in range(2):
                    with m.If(half == number):
                        m.d.sync += [
                            kept.full[number].eq(1),
                            kept.counts[number].eq(rank),
                            kept.last[number].eq(group.last),
                        ]
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += [running.eq(1), ended.eq(0)]

    def _send(self, m: Module, kept: "_Kept", running: Signal) -> None:
        """Each tile twice: through its checksum, and out; behind the last one the header."""
        m.submodules.crc, m.submodules.heads_crc = crc, heads_crc = Crc32c(), Crc32c()
        half, at, number = Signal(), Signal(self.tile_bits - _BANK_BITS + 1), Signal(32 - self.tile_bits)
        total, first = Signal(32), Signal(32)  # words changed; words sent, of 64 bits
        out, step = Signal(), Signal()  # the second time; a word is done with
        tile = _Tile(m, kept, half, self.i_command.payload.params, self.tile_bits)
        word, ahead = Signal(64), Signal.like(at)
        m.d.sync += at.eq(ahead)
        m.d.comb += [
            ahead.eq(at),
            step.eq(~out | self.o.ready),
            self.o.payload.eq(word),
            crc.data.eq(word),
            heads_crc.data.eq(word),
            heads_crc.first.eq(number == 0),
        ]
        kept.read(m, ahead[:-1], half)
        command = self.o_command.payload
        with m.FSM():
            with m.State("WAIT-TILE"):
                m.d.comb += ahead.eq(0)
                with m.If(running & kept.full.bit_select(half, 1)):
                    m.next = "TILE-WORD"
            with m.State("COMMAND"):
                m.d.comb += [self.o_command.valid.eq(1), command.words.eq(1 + tile.words), command.last.eq(tile.last)]
                m.d.comb += command.first.eq(_HEADER_WORDS + first)
                with m.If(self.o_command.ready):
                    m.d.sync += [out.eq(1), first.eq(first + 1 + tile.words), total.eq(total + tile.values)]
                    m.next = "TILE-WORD"
            with m.State("TILE-WORD"):
                m.d.comb += [
                    crc.first.eq(1),
                    self.o.valid.eq(out),
                    word.eq(Cat(number, C(0, self.tile_bits), tile.head)),
                ]
                with m.If(out):
                    m.d.comb += [word.eq(Cat(tile.head, crc.o)), heads_crc.enable.eq(step)]
                m.d.comb += crc.enable.eq(~out)
                with m.If(step):
                    m.next = "INDICES"
                    with m.If(tile.dense):
                        m.next = "WORDS"
                    with m.Elif(tile.values == 0):
                        self._end(m, kept, tile, half, number, out)
            self._section(m, "INDICES", tile, at, ahead, (out, step, word, crc), kept.pair_words(0))
            self._section(m, "WORDS", tile, at, ahead, (out, step, word, crc),
                          Mux(tile.dense, kept.group_words(), kept.pair_words(1)))  # fmt: skip
            with m.State("TILE-END"):
                self._end(m, kept, tile, half, number, out)
            self._header(m, (number, total, first, heads_crc.o), running)

    def _section(
        self, m: Module, name: str, tile: "_Tile", at: Signal, ahead: Signal, flow: tuple[Any, ...], shown: Any
    ) -> None:
        """A state for words of four elements: those past the last one are zero."""
        out, step, word, crc = flow
        left = Signal(self.tile_bits + 2, name=f"left_{name.lower()}")
        with m.State(name):
            m.d.comb += [left.eq(tile.values - (at << 2)), self.o.valid.eq(out), crc.enable.eq(~out)]
            for lane in range(_BANKS):
                with m.If(left > lane):
                    m.d.comb += word.word_select(lane, 16).eq(shown[16 * lane : 16 * lane + 16])
            with m.If(step):
                m.d.comb += ahead.eq(at + 1)
                with m.If(left <= _BANKS):
                    m.d.comb += ahead.eq(0)
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
            ((first + _HEADER_WORDS) << 3)[:32], heads_crc, crc.o,
        )  # fmt: skip
        m.d.comb += [crc.data.eq(halves.word_select(part, 32)), crc.first.eq(part == 0)]
        with m.State("HEADER-CRC"):
            m.d.comb += crc.enable.eq(1)
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
                    m.d.sync += [part.eq(0), number.eq(0), total.eq(0), first.eq(0), running.eq(0)]
                    m.next = "WAIT-TILE"


class _Tile:
    """The tile in a half: its size, what is sent of it, and the first half of its word."""

    def __init__(self, m: Module, kept: "_Kept", half: Signal, params: Any, tile_bits: int) -> None:
        bits = tile_bits + 1
        count, size = Signal(bits, name="tile_count"), Signal(bits, name="tile_size")
        self.last, self.dense = Signal(name="tile_last"), Signal(name="tile_dense")
        self.values = Signal(bits, name="tile_values")
        self.words = Signal(bits, name="tile_words")
        section = Signal(bits, name="tile_section")
        part = params[:tile_bits]
        m.d.comb += [
            count.eq(Mux(half, kept.counts[1], kept.counts[0])),
            self.last.eq(kept.last.bit_select(half, 1)),
            size.eq(Mux(self.last & (part != 0), part, 1 << tile_bits)),
            self.dense.eq(count * DENSE_ABOVE > size),
            self.values.eq(Mux(self.dense, size, count)),
            section.eq((self.values + _BANKS - 1) >> 2),
            self.words.eq(Mux(self.dense, section, section << 1)),
        ]
        self.head = Cat(self.values, C(0, 16 - bits), Mux(self.dense, C(DENSE, 16), C(0, 16)))


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
