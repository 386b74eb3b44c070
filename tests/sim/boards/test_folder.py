"""Folders of bitstreams for simulated boards are those that drivers read."""

import pytest

from nearflash.abi.config import CONFIGS
from nearflash.abi.errors import BitstreamError
from nearflash.device.backends.board import bitstream, use_p2p
from nearflash.device.bitstreams import load_board

folder = pytest.importorskip("nearflash.sim.boards.folder")


def test_a_written_board_is_found_verified_and_watched(tmp_path, monkeypatch):
    files = {"update": {".bit": b"1", ".hwh": b"2"}, "attend": {".bit": b"3"}}
    written = folder.write_board(tmp_path, "tiny", "pynq", files)
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(tmp_path))
    assert load_board("tiny").kernels == ("update-tiny", "attend-tiny")
    assert bitstream(CONFIGS["update-tiny"], ".hwh") == written / "update-tiny.hwh"
    assert bitstream(CONFIGS["attend-tiny"], ".bit").read_bytes() == b"3"
    with pytest.raises(BitstreamError, match=r"must have one .xclbin file, not 0"):
        bitstream(CONFIGS["update-tiny"], ".xclbin")
    (written / "update-tiny.bit").write_bytes(b"4")
    with pytest.raises(BitstreamError, match="must have the SHA-256"):
        bitstream(CONFIGS["update-tiny"], ".hwh")


def test_p2p_can_be_left_out():
    assert use_p2p({}) and use_p2p({"NEARFLASH_P2P": "1"}) and not use_p2p({"NEARFLASH_P2P": "0"})
