"""Manifests: files and digests are compared, and nothing that differs is accepted."""

import json
from dataclasses import replace

import pytest

from nearflash.abi.errors import BitstreamError, ConfigError, DigestError
from nearflash.abi.kernel.config import config
from nearflash.device.bitstreams import BuildManifest, load_board, load_manifest
from nearflash.device.bitstreams.board import Limits, Resources
from nearflash.device.bitstreams.manifest import sha256
from nearflash.verify.fixtures.built import make_files


@pytest.fixture
def manifest(desk) -> BuildManifest:
    """A manifest and its two files, written beside the board."""
    files = make_files(load_board("desk"), "update", "5" * 64)
    for name, content in files.items():
        (desk / name).write_bytes(content)
    made = BuildManifest(
        board="desk", config="update-tiny", digest=config("update-tiny").digest, design="5" * 64, git="6" * 40,
        tools={"yosys": "0.70"}, files={name: sha256(desk / name) for name in files},
        utilisation=Resources(40, 50, 2, 0.5), clock_hz=40_000_000, fmax_hz=41_500_000,
        critical_path=("FDRE a", "LUT6 b", "FDRE c"), evidence="routed",
    )  # fmt: skip
    (desk / "update.json").write_text(made.to_json())
    return made


def change(desk, **values):
    path = desk / "update.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_manifest_reads_back_and_its_files_are_good(desk, manifest):
    found = load_manifest(load_board("desk"), "update")
    assert found == manifest
    found.verify()
    found.check_limits(load_board("desk"))
    assert found.kernel == "update"
    assert found.file(".bit") == desk.resolve() / "update.bit"


def test_a_manifest_that_is_missing_states_how_to_build(desk):
    with pytest.raises(BitstreamError, match=r"update.json must exist; run `make bitstream BOARD=desk KERNEL=update`"):
        load_manifest(load_board("desk"), "update")
    with pytest.raises(ConfigError, match="kernel of desk must be one of"):
        load_manifest(load_board("desk"), "expand")


def test_a_file_that_changed_or_is_missing_is_named(desk, manifest):
    (desk / "update.bit").write_bytes(b"other")
    with pytest.raises(BitstreamError, match=r"update.bit must have the SHA-256 of its manifest, \w{16}, not \w{16}"):
        manifest.verify()
    (desk / "update.bit").unlink()
    with pytest.raises(BitstreamError, match=r"update.bit must exist; run `make bitstream BOARD=desk KERNEL=update`"):
        manifest.verify()


def test_a_build_of_another_configuration_is_a_digest_error(desk, manifest):
    change(desk, digest="0" * 64)
    other = load_manifest(load_board("desk"), "update")
    with pytest.raises(DigestError, match=r"must be a build of update-tiny with digest .*, not 0000000000000000; run"):
        other.verify()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"digest": "12"}, "digest must be a SHA-256, 64 hex digits, not '12'"),
        ({"design": "X" * 64}, "design must be a SHA-256"),
        ({"files": {"update.bit": "12"}}, "update.bit must be a SHA-256"),
        ({"files": {"../update.bit": "0" * 64}}, r"files must be names of files beside it, not '\.\./update.bit'"),
        ({"files": []}, r"files must be a table, not \[\]"),
        ({"evidence": "believed"}, "evidence must be one of simulated, .*, not 'believed'"),
        ({"fmax_hz": 39_000_000}, "clock_hz must be at most fmax_hz, 39000000, not 40000000"),
        ({"derating": 0.65}, "clock_hz must be at most 0.65 of fmax_hz, 41500000, not 40000000"),
        ({"derating": 0}, "derating must be above 0 and at most 1, not 0"),
        ({"derating": 1.2}, "derating must be above 0 and at most 1, not 1.2"),
        ({"fmax_hz": "fast"}, "fmax_hz must be a whole number, not 'fast'"),
        ({"board": "other"}, "must be of update-tiny for desk, not of update-tiny for other"),
        ({"config": "update-smartssd"}, "must be of update-tiny for desk, not of update-smartssd for desk"),
        ({"vendor": "no"}, "must have only board, .*, not vendor"),
    ],
)
def test_a_malformed_manifest_is_rejected_with_the_key(desk, manifest, values, message):
    change(desk, **values)
    with pytest.raises(BitstreamError, match=message):
        load_manifest(load_board("desk"), "update")


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", "[" * 100_000])
def test_what_is_no_manifest_is_rejected(desk, manifest, text):
    (desk / "update.json").write_text(text)
    with pytest.raises(BitstreamError, match=r"update.json(: manifest)? must be"):
        load_manifest(load_board("desk"), "update")


def test_one_file_of_a_kind(desk, manifest):
    with pytest.raises(BitstreamError, match=r"desk/update must have one .xclbin file, not 0"):
        manifest.file(".xclbin")
    two = replace(manifest, files={"a.bit": "0" * 64, "b.bit": "0" * 64})
    with pytest.raises(BitstreamError, match=r"must have one .bit file, not 2"):
        two.file(".bit")


@pytest.mark.parametrize(("name", "most"), [("lut", 39), ("ff", 49), ("dsp", 1), ("bram36", 0)])
def test_more_cells_than_the_limit_are_a_regression(desk, manifest, name, most):
    limits = replace(Limits(40, 50, 2, 0.5), **{name: most})
    with pytest.raises(BitstreamError, match=f"desk/update: {name} must be at most {most}, not"):
        manifest.check_limits(replace(load_board("desk"), limits={"update": limits}))


def test_a_slower_build_is_a_regression_and_no_limits_are_none(desk, manifest):
    board = load_board("desk")
    slower = Limits(40, 50, 2, 0.5, 42_000_000)
    with pytest.raises(BitstreamError, match="desk/update: fmax_hz must be at least 42000000, not 41500000"):
        manifest.check_limits(replace(board, limits={"update": slower}))
    manifest.check_limits(replace(board, limits={"attend": Limits(0, 0, 0, 0)}))
