"""The proof of a committed bitstream; in `make test`, test_flow.py and test_emit.py do its parts on small designs."""

import shutil

import pytest

from nearflash.abi.errors import BitstreamError, ConfigError
from nearflash.boards.open.decode.device import BitstreamDevice
from nearflash.boards.open.decode.prove import LEVEL, BitstreamProof, prove
from nearflash.boards.open.packages import find_programs
from nearflash.device.bitstreams import load_board, load_manifest

GOOD = BitstreamProof(set_bits=9, unexplained=0, undriven_pins=0, places=5, differing_places=0, words=3,
                      words_differing=0, violations=0, mutants=4, mutants_seen=4, fmax_hz=5,
                      decoded_fmax_hz=4, late_endpoints=0, hold_violations=1)  # fmt: skip


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The PYNQ-Z2 in a folder that may change."""
    shutil.copytree(load_board("pynq-z2").folder, tmp_path / "pynq-z2")
    monkeypatch.setenv("NEARFLASH_BITSTREAMS", str(tmp_path))
    return load_board("pynq-z2")


def test_each_fault_spoils_a_proof():
    assert GOOD.holds
    for name in ("unexplained", "undriven_pins", "differing_places", "words_differing", "violations", "late_endpoints"):
        assert not BitstreamProof(**{**GOOD.to_dict(), name: 1}).holds
    assert not BitstreamProof(**{**GOOD.to_dict(), "mutants_seen": 3}).holds
    assert not BitstreamProof(**{**GOOD.to_dict(), "words": 0}).holds


def test_a_bitstream_without_its_routed_netlist_has_no_proof(board):
    manifest = load_manifest(board, "expand")
    (board.folder / "expand.json").write_text(manifest.to_json().replace("expand.places.xz", "expand.txt"))
    (board.folder / "expand.places.xz").rename(board.folder / "expand.txt")
    with pytest.raises(BitstreamError, match=r"must have expand.places.xz, .* bitstream build pynq-z2 --kernel expand"):
        prove(board, "expand")


def test_a_configuration_of_no_bitstream_is_an_error():
    with pytest.raises(ConfigError, match="must be one that a board of the open flow has, not 'update-tiny'"):
        BitstreamDevice.open("update-tiny")


@pytest.mark.full
def test_expand_is_proved(board):
    if find_programs() is None:
        pytest.skip("programs of Debian sid were not fetched: make bitstream fetches them")
    manifest = load_manifest(board, "expand")
    found = prove(board, "expand", mutants=20)
    assert found.holds and found.places > 20_000 and found.words == 8640 and found.mutants == 20
    stated = load_manifest(board, "expand")
    assert stated.evidence == LEVEL and 0 < stated.decoded_fmax_hz == found.decoded_fmax_hz < found.fmax_hz
    assert "ns CLBL" in stated.decoded_path[0] and "FF." in stated.decoded_path[-1]
    with BitstreamDevice.open("expand-pynq-z2") as device:
        # Regression: it was 0 in all bitstreams.
        assert device.identity.git_revision == int(manifest.git[:8], 16)
