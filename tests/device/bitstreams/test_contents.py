"""What files state of themselves: a manifest that was adjusted to another file does not make it the right one."""

import json
import struct

import pytest

from nearflash.abi.errors import BitstreamError
from nearflash.abi.kernel.config import config
from nearflash.device.bitstreams import load_board, load_manifest
from nearflash.device.bitstreams.contents import check_xclbin
from nearflash.device.bitstreams.header import Label
from nearflash.device.bitstreams.manifest import sha256
from nearflash.verify.fixtures.built import bit_file, make_files

DESIGN = "5" * 64
LABEL = Label("update", "update-tiny", config("update-tiny").digest, DESIGN)


@pytest.fixture
def put(desk):
    """A function that writes the files of a build, some of them others, and a manifest that fits them."""

    def write(**others):
        files = make_files(load_board("desk"), "update", DESIGN)
        files |= {f"update.{suffix}": content for suffix, content in others.items()}
        for name, content in files.items():
            (desk / name).write_bytes(content)
        manifest = {
            "board": "desk", "config": "update-tiny", "digest": LABEL.digest, "design": DESIGN, "git": "6" * 40,
            "tools": {}, "files": {name: sha256(desk / name) for name in files},
            "utilisation": {"lut": 1, "ff": 1, "dsp": 1, "bram36": 1}, "clock_hz": 40_000_000,
            "fmax_hz": 45_000_000, "critical_path": [], "evidence": "routed",
        }  # fmt: skip
        (desk / "update.json").write_text(json.dumps(manifest))
        return load_manifest(load_board("desk"), "update")

    return write


def handoff(old="", new=""):
    text = make_files(load_board("desk"), "update", DESIGN)["update.hwh"].decode()
    assert old in text
    return text.replace(old, new).encode()


def test_the_right_files_are_accepted(put):
    put().verify()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be a .bit file"),
        (b"anything at all", "must be a .bit file"),
        (bit_file(LABEL, "xc7z045ffg900-2"), "must be for xc7z020clg400-1, not for 'xc7z045ffg900-2'"),
        (bit_file(LABEL, "xc7z020clg484-1"), "must be for xc7z020clg400-1"),
        (bit_file(LABEL, ""), "must be for xc7z020clg400-1, not for ''"),
        (bit_file(LABEL, "xc7z020clg400-1", code=0x3731093), "must configure a device of code 0x3727093"),
        (bit_file(LABEL, "xc7z020clg400-1")[:-1], "bytes of data behind its header"),
        (bit_file(LABEL, "xc7z020clg400-1")[:-1] + b"x", "must have the label of its build, 'BITS="),
        (bit_file(Label("attend", "attend-tiny", config("attend-tiny").digest, DESIGN), "xc7z020clg400-1"),
         "must have the label of its build, 'update'"),
        (bit_file(Label("update", "update-tiny", LABEL.digest, "7" * 64), "xc7z020clg400-1"), "'DESIGN=5555"),
    ],
)  # fmt: skip
def test_another_bitstream_with_an_adjusted_manifest_is_refused(put, content, message):
    with pytest.raises(BitstreamError, match=message):
        put(bit=content).verify()


def test_bits_without_a_device_are_refused(put):
    payload = b"\xff" * 99
    text = LABEL.text(payload)
    whole = bit_file(LABEL, "xc7z020clg400-1")
    head = whole[:13] + b"a" + struct.pack(">H", len(text) + 1) + text.encode() + b"\0"
    tail = b"b\0\x10xc7z020clg400-1\0c\0\1\0d\0\1\0e" + struct.pack(">I", len(payload)) + payload
    with pytest.raises(BitstreamError, match=r"must configure a device of code 0x3727093 .*, not none"):
        put(bit=head + tail).verify()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("clg400", "clg484", "update.hwh must be for xc7z020clg400-1, not for 'xc7z020clg484-1'"),
        ("nearflash:kernel:update:1.0", "nearflash:kernel:attend:1.0", "must have one kernel, nearflash:kernel:update"),
        ("nearflash:kernel:update:1.0", "xilinx.com:ip:x:1.0", "must have one kernel, .*, not none"),
        (LABEL.digest, "0" * 64, "must have CONFIG_DIGEST .* it is of another build"),
        ("update-tiny", "update-smartssd", "must have CONFIG update-tiny"),
        ('NAME="magic"', 'NAME="tragic"', "must have the registers of update-tiny: 'magic'"),
        ('"ADDRESS_OFFSET" VALUE="16"', '"ADDRESS_OFFSET" VALUE="20"', "must have the registers of update-tiny"),
        ('"PCW_FPGA0_PERIPHERAL_FREQMHZ" VALUE="40', '"PCW_FPGA0_PERIPHERAL_FREQMHZ" VALUE="80', "40.000000 MHz"),
        ('"PCW_FPGA0_PERIPHERAL_FREQMHZ" VALUE="40', '"PCW_FPGA0_PERIPHERAL_FREQMHZ" VALUE="x', "40.000000 MHz"),
        ("<EDKSYSTEM ", '<!DOCTYPE a [<!ENTITY b "c">]><EDKSYSTEM ', "without entities of its own"),
        ("EDKSYSTEM", "SYSTEM", "must be a hardware handoff, EDKSYSTEM, not 'SYSTEM'"),
        ("</MODULES>", "", "must be a hardware handoff in XML"),
        ("<?xml version='1.0' encoding='utf-8'?>", "<?xml version='1.0' encoding='latin-99'?>", "in XML"),
    ],
)
def test_another_handoff_with_an_adjusted_manifest_is_refused(desk, put, old, new, message):
    with pytest.raises(BitstreamError, match=message):
        put(hwh=handoff(old, new)).verify()


def test_a_routed_build_has_both(desk, put):
    manifest = put()
    body = json.loads((desk / "update.json").read_text())
    for name in manifest.files:
        files = {other: digest for other, digest in manifest.files.items() if other != name}
        (desk / "update.json").write_text(json.dumps(body | {"files": files}))
        with pytest.raises(BitstreamError, match=rf"must have one \{name[-4:]} file, not 0"):
            load_manifest(load_board("desk"), "update").verify()


def test_an_xclbin_states_its_length(tmp_path):
    path = tmp_path / "x.xclbin"
    begin = b"xclbin2\0" + bytes(296)
    path.write_bytes(begin + struct.pack("<Q", 320) + bytes(8))
    check_xclbin(path)
    for content in (b"", b"xclbin2\0", begin + struct.pack("<Q", 321) + bytes(8), b"\x7fELF" + bytes(400)):
        path.write_bytes(content)
        with pytest.raises(BitstreamError, match=r"x\.xclbin must"):
            check_xclbin(path)
