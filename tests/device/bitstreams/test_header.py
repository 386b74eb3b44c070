"""Headers of .bit files."""

import pytest

from nearflash.abi.errors import BitstreamError
from nearflash.device.bitstreams.header import BitHeader, Label, rename_design, split_bit

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
    assert split_bit(path)[0] == BitHeader("top", "7z020clg400", "2026/01/01", "00:00:00", 20)


def test_texts_may_be_empty(tmp_path):
    path = tmp_path / "x.bit"
    path.write_bytes(bit(a="", c="", d=""))
    assert split_bit(path)[0] == BitHeader("", "7z020clg400", "", "", 20)


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
        assert split_bit(path)[0].payload_bytes == 0
        return
    with pytest.raises(BitstreamError, match=message):
        split_bit(path)


def test_every_cut_is_noticed(tmp_path):
    whole = bit()
    path = tmp_path / "x.bit"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BitstreamError):
            split_bit(path)


def test_a_renamed_design_has_no_date_and_the_same_data(tmp_path):
    files = [tmp_path / name for name in ("x.bit", "y.bit")]
    for path, options in zip(
        files, ({}, {"a": "/somewhere/else.frm", "c": "2026/11/25", "d": "03:54:32"}), strict=True
    ):
        path.write_bytes(bit(bytes(range(20)), **options))
        rename_design(path, "update")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert split_bit(files[0])[0] == BitHeader("update", "7z020clg400", "2000/01/01", "00:00:00", 20)
    assert files[0].read_bytes().endswith(bytes(range(20)))


def test_a_file_that_is_no_bitstream_is_not_renamed(tmp_path):
    path = tmp_path / "x.bit"
    path.write_bytes(bit()[:-1])
    with pytest.raises(BitstreamError):
        rename_design(path, "update")
    assert path.read_bytes() == bit()[:-1]


def test_a_label_is_of_its_build_and_its_bits(tmp_path):
    path, label = tmp_path / "x.bit", Label("update", "update-tiny", "1" * 64, "2" * 64)
    path.write_bytes(bit(bytes(range(20)), a="top;UserID=0XFFFFFFFF"))
    label.write(path, path)
    header, payload = split_bit(path)
    assert header.design.startswith("update;CONFIG=update-tiny;DIGEST=1") and payload == bytes(range(20))
    label.check(header, payload, path)
    for other, bits in (
        (Label("attend", "update-tiny", "1" * 64, "2" * 64), payload),
        (Label("update", "update-smartssd", "1" * 64, "2" * 64), payload),
        (Label("update", "update-tiny", "3" * 64, "2" * 64), payload),
        (Label("update", "update-tiny", "1" * 64, "3" * 64), payload),
        (label, payload[:-1] + b"x"),
    ):
        with pytest.raises(BitstreamError, match=r"x.bit must have the label of its build"):
            other.check(header, bits, path)
