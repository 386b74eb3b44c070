"""Headers of .bit files."""

import pytest

from nearflash.abi.errors import BitstreamError
from nearflash.device.bitstreams.header import BitHeader, read_header

START = bytes.fromhex("0009 0ff00ff00ff00ff000 0001")


def bit(payload=b"\xff" * 20, **fields):
    """Bytes of a .bit file; fields a to d replace texts, `length` the payload's."""
    texts = {"a": "top", "b": "7z020clg400", "c": "2026/01/01", "d": "00:00:00"} | fields
    body = b"".join(letter.encode() + len(text + "\0").to_bytes(2, "big") + text.encode() + b"\0"
                    for letter, text in texts.items() if letter != "length")  # fmt: skip
    return START + body + b"e" + fields.get("length", len(payload)).to_bytes(4, "big") + payload


def test_a_header_has_five_fields(tmp_path):
    path = tmp_path / "x.bit"
    path.write_bytes(bit())
    assert read_header(path) == BitHeader("top", "7z020clg400", "2026/01/01", "00:00:00", 20)


def test_texts_may_be_empty(tmp_path):
    path = tmp_path / "x.bit"
    path.write_bytes(bit(a="", c="", d=""))
    assert read_header(path) == BitHeader("", "7z020clg400", "", "", 20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a .bit file, not one that begins with nothing"),
        (b"<?xml", "must be a .bit file, not one that begins 3c3f786d"),
        (START, "must have a field 'a' at byte 13, not b''"),
        (bit()[:20], "must have a field 'b' at byte 20, not b''"),
        (bit()[:30], "must have a field 'b' at byte 20, not b'b'"),
        (bit().replace(b"c\0", b"x\0"), "must have a field 'c' at byte 35, not b'x'"),
        (bit(length=21), "must have 21 bytes of data behind its header, not 20"),
        (bit()[:-1], "must have 20 bytes of data behind its header, not 19"),
        (bit(b""), None),
    ],
)
def test_what_is_no_bitstream_is_named(tmp_path, content, message):
    path = tmp_path / "x.bit"
    path.write_bytes(content)
    if message is None:
        assert read_header(path).payload_bytes == 0
        return
    with pytest.raises(BitstreamError, match=message):
        read_header(path)


def test_every_cut_is_noticed(tmp_path):
    whole = bit()
    path = tmp_path / "x.bit"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BitstreamError):
            read_header(path)
