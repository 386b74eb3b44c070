"""Header check of Top-K gradient streams: the first four words, then the rest as it is.

Contract: a command takes exactly its words from `i`. After the header's, `o_start` says what is to come, and stands
until the next command; the rest passes to `o` where the header is good, and is dropped where it is not. The checksum is
made outside, one for the header and all that follows. Reset drops what is inside.

Timing: a word a cycle; `o_start` comes LATENCY cycles after the header's last word; i to o is combinational;
back-pressure: yes.
Source: nearflash.abi.topk.StreamHeader.
"""

from typing import Any

from amaranth import C, Cat, Module, Mux, Signal, Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.crc import CRC_RESIDUE
from nearflash.abi.topk import (
    HEADER_BYTES,
    MAGIC,
    TILE_BITS,
    VERSION,
    WORD_BYTES,
    StreamFault,
    ValueFormat,
)
from nearflash.gateware.coding.kept_net import equal

__all__ = ["HeaderCheck", "TilesCommand", "TopKCommand", "tiles_of"]

_MAGIC = int.from_bytes(MAGIC, "little") | VERSION << 32
_WORDS = HEADER_BYTES // WORD_BYTES
_WORD_BITS = WORD_BYTES.bit_length() - 1


class TopKCommand(data.Struct):
    """Expand a stream of `stream_bytes` bytes to the gradients of `params` parameters."""

    params: 32
    stream_bytes: 32


class TilesCommand(data.Struct):
    """Tiles for `params` parameters, with `pairs` pairs; none of that where `fault` is not 0."""

    params: 32
    pairs: 32
    value_format: ValueFormat
    fault: StreamFault


def tiles_of(params: Value) -> Value:
    """How many tiles so many parameters have."""
    return params[TILE_BITS:] + params[:TILE_BITS].any()


class HeaderCheck(wiring.Component):
    """Checks a stream's header against the command.

    Members
    -------
    i_command : In stream of TopKCommand; taken when the words of the one before were.
    i : In stream of 64-bit words.
    o_start : Out stream of TilesCommand.
    o : Out stream of 64-bit words, those behind a good header. more : Out, words are still to come on `o`.
    begins : Out, the next word is the first one, where the checksum begins.
    crc : In, CRC32C of all words that were taken.
    """

    #: Cycles from the header's last word to `o_start`.
    LATENCY = 2

    i_command: In(stream.Signature(TopKCommand))
    i: In(stream.Signature(64))
    o_start: Out(stream.Signature(TilesCommand))
    o: Out(stream.Signature(64))
    more: Out(1)
    begins: Out(1)
    crc: In(32)

    def elaborate(self, platform: object) -> Module:
        """Collect what is wrong with each word; judge once the checksum is there."""
        m = Module()
        command = Signal(TopKCommand, reset_less=True)
        start = self.o_start.payload
        number = Signal(range(_WORDS + 1))  # of the header's words that were taken
        words = Signal(32 - _WORD_BITS, reset_less=True)  # that were taken
        left, taken, good = Signal(), Signal(), Signal()
        wrong = Signal(data.StructLayout({"magic": 1, "params": 1, "length": 1}))
        m.d.comb += [
            taken.eq(self.i.valid & self.i.ready),
            left.eq(~equal(m, words, command.stream_bytes[_WORD_BITS:])),
            self.o.payload.eq(self.i.payload),
        ]
        with m.If(taken):
            m.d.sync += words.eq(words + 1)
        with m.If(self.i_command.valid & self.i_command.ready):
            m.d.sync += words.eq(0)

        self._compare(m, number, command, wrong)
        with m.FSM():
            with m.State("WAIT-COMMAND"):
                m.d.comb += self.i_command.ready.eq(1)
                with m.If(self.i_command.valid):
                    m.d.sync += [command.eq(self.i_command.payload), number.eq(0)]
                    m.d.sync += start.fault.eq(StreamFault.NONE)
                    m.next = "HEADER"
            with m.State("HEADER"):
                m.d.comb += self.i.ready.eq(left)
                with m.If(taken):
                    m.d.sync += number.eq(number + 1)
                    with m.If(number == _WORDS - 1):
                        m.next = "CHECK"
                with m.If(~left):
                    m.d.sync += start.fault.eq(StreamFault.LENGTH)
                    m.next = "START"
            with m.State("CHECK"):
                length = Mux(wrong.length, StreamFault.LENGTH, StreamFault.NONE)
                shape = Mux(wrong.params, StreamFault.HEADER, length)
                damaged = Mux(self.crc != CRC_RESIDUE, StreamFault.CHECKSUM, shape)
                m.d.sync += start.fault.eq(Mux(wrong.magic, StreamFault.HEADER, damaged))
                m.next = "START"
            with m.State("START"):
                m.d.comb += self.o_start.valid.eq(1)
                with m.If(self.o_start.ready):
                    m.next = "PASS"
            with m.State("PASS"):
                m.d.comb += self.o.valid.eq(self.i.valid & self.more)
                m.d.comb += self.i.ready.eq((self.o.ready | ~good) & left)
                with m.If(~left):
                    m.next = "WAIT-COMMAND"
        m.d.comb += [
            good.eq(start.fault == StreamFault.NONE),
            start.params.eq(command.params),
            self.more.eq(good & left),
            self.begins.eq(number == 0),
        ]
        return m

    def _compare(self, m: Module, number: Signal, command: Any, wrong: Any) -> None:
        """A word of the header with what it should be; keep what it says."""
        word, start = self.i.payload, self.o_start.payload
        named = equal(m, word[:48], C(_MAGIC, 48))
        shaped = (word[48:56] < len(ValueFormat)) & (word[56:] == TILE_BITS)
        tiles = tiles_of(command.params)
        same_params = equal(m, word, Cat(command.params, tiles, C(0, 32 - len(tiles))))
        same_bytes = equal(m, word[32:], command.stream_bytes)
        with m.If(self.i.valid & self.i.ready), m.Switch(number):
            with m.Case(0):
                m.d.sync += [wrong.magic.eq(~named), wrong.params.eq(~shaped), start.value_format.eq(word[48:])]
            with m.Case(1):
                m.d.sync += wrong.params.eq(wrong.params | ~same_params)
            with m.Case(2):
                part = command.stream_bytes[:_WORD_BITS].any()  # of a word
                m.d.sync += [wrong.length.eq(~same_bytes | part), start.pairs.eq(word[:32])]
