"""Vectors of the header check of Top-K streams: good headers, and such that are wrong in a bit or too short."""

from typing import Any

import numpy as np
from amaranth.hdl import Cat, Const, Module, Mux, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import Out
from numpy.typing import NDArray

from nearflash.abi.crc import CRC_POLYNOMIAL, CRC_RESIDUE, crc32c
from nearflash.abi.errors import StreamError
from nearflash.abi.topk import HEADER_BYTES, WORD_BYTES, StreamFault, StreamHeader, ValueFormat
from nearflash.gateware.coding.crc import Crc32c
from nearflash.gateware.gradients.header import HeaderCheck
from nearflash.sim.verilator.ports import words_from_integers
from nearflash.verify.mutants.observed import gate

__all__ = ["ObservedHeader", "vectors"]

_COMMANDS = 120
_START_BITS = 69
_CRC_AT = 8 * (HEADER_BYTES - 4)


class ObservedHeader(wiring.Component):
    """HeaderCheck as `inner`, with its checksum; a start with a fault says nothing else.

    Words of `o` come with the start that stands.
    """

    def __init__(self) -> None:
        self._inner = HeaderCheck()
        streams = ("i_command", "i", "o_start")
        o = Out(stream.Signature(64 + _START_BITS))
        super().__init__({name: self._inner.signature.members[name] for name in streams} | {"o": o})

    def elaborate(self, platform: Any) -> Module:
        """Build it with the checksum of all words that it takes."""

        def start(payload: Any) -> Any:
            bits = Value.cast(payload)
            return Mux(payload.fault == StreamFault.NONE, bits, Cat(Const(0, len(bits) - 3), payload.fault))

        m = Module()
        m.submodules.inner = inner = self._inner
        m.submodules.crc = crc = Crc32c()
        for name in ("i_command", "i"):
            wiring.connect(m, wiring.flipped(getattr(self, name)), getattr(inner, name))
        gate(m, inner.o_start, self.o_start, start)
        gate(m, inner.o, self.o, lambda word: Cat(word, inner.o_start.payload))
        m.d.comb += [
            crc.enable.eq(self.i.valid & self.i.ready),
            crc.first.eq(inner.begins),
            crc.data.eq(self.i.payload),
            inner.crc.eq(crc.o),
        ]
        return m


def vectors(rng: np.random.Generator) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Commands of up to nine words behind the header; the last one has more than a run could bring."""
    commands, starts, words, passed = [], [], [], []
    for number in range(_COMMANDS):
        params, stream_bytes = _params(rng), HEADER_BYTES + WORD_BYTES * int(rng.integers(10))
        if number == _COMMANDS - 1:
            stream_bytes = HEADER_BYTES + (1 << int(rng.integers(8, 29))) * WORD_BYTES
        header = StreamHeader(
            ValueFormat(int(rng.integers(len(ValueFormat)))), params, int(rng.integers(1 << 32)), stream_bytes
        )
        text = bytearray(header.pack())
        if number != _COMMANDS - 1:
            params, stream_bytes = _spoil(rng, text, params, stream_bytes)
        count = min(stream_bytes // WORD_BYTES, 24)
        body = rng.integers(0, 1 << 64, max(count - 4, 0), np.uint64)
        words.append(np.concatenate([np.frombuffer(text, "<u8"), body])[:count])
        commands.append(params | stream_bytes << 32)
        try:
            said = StreamHeader.unpack(bytes(text), params, stream_bytes)
        except StreamError as error:
            starts.append(int(error.fault) << 66)
        else:
            starts.append(params | said.pairs << 32 | said.value_format << 64)
            passed += [word | starts[-1] << 64 for word in body.tolist()]
    inputs: dict[str, NDArray[Any]] = {"i_command": np.array(commands, np.uint64), "i": np.concatenate(words)}
    return inputs, {
        "o_start": words_from_integers(starts, _START_BITS),
        "o": words_from_integers(passed, 64 + _START_BITS),
    }


def _params(rng: np.random.Generator) -> int:
    """Of any size, or next to a multiple of a tile's."""
    some = int(rng.integers(1, 1 << int(rng.integers(1, 33))))
    return some if rng.integers(2) else max(min((some >> 12 << 12) + int(rng.integers(-1, 2)), (1 << 32) - 1), 1)


def _spoil(rng: np.random.Generator, text: bytearray, params: int, stream_bytes: int) -> tuple[int, int]:
    """Half of the headers stay good; parameters and bytes of the command."""
    kind, bit = int(rng.integers(10)), int(rng.integers(8 * HEADER_BYTES))
    if kind < 3:  # a bit, perhaps below a checksum that is right
        if kind < 2:
            bit %= _CRC_AT
        text[bit // 8] ^= 1 << bit % 8
        if kind < 2:
            text[_CRC_AT // 8 :] = crc32c(bytes(text[: _CRC_AT // 8])).to_bytes(4, "little")
    elif kind == 3:
        text[_CRC_AT // 8 :] = _checksum(bytes(text[: _CRC_AT // 8]), CRC_RESIDUE ^ 1 << bit % 32)
    elif kind == 4:
        stream_bytes = int(rng.integers(HEADER_BYTES + WORD_BYTES))
    elif kind == 5:
        params = max(params ^ 1 << int(rng.integers(32)), 1)
    return params, stream_bytes


def _checksum(text: bytes, crc: int) -> bytes:
    """What to write behind `text` so that the whole has this CRC: the register that is to be there, 32 steps back."""
    register = ~crc & 0xFFFFFFFF
    for _ in range(32):
        register = (register ^ CRC_POLYNOMIAL) << 1 | 1 if register >> 31 else register << 1
    return (register ^ ~crc32c(text) & 0xFFFFFFFF).to_bytes(4, "little")
