"""Manifests: `bitstreams/<board>/<kernel>.json`, which states what was built, by what, and how good it is.

A manifest names its files with their SHA-256 and the digest of the configuration, so that a host never loads a
bitstream that is not the one that its registers belong to.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from nearflash.abi.errors import BitstreamError, DigestError
from nearflash.abi.kernel.config import KernelConfig, config
from nearflash.device.bitstreams.board import Board, Resources, load_board, rule
from nearflash.device.bitstreams.contents import check_bit, check_handoff, check_xclbin
from nearflash.device.bitstreams.header import Label
from nearflash.support.tables import TableReader, read_json

__all__ = ["EVIDENCE", "PLACES", "BuildManifest", "load_manifest", "sha256"]

EVIDENCE = ("simulated", "synthesised", "routed", "proved by decoding", "ran on silicon")
"""Levels, from weak to strong: nothing is stated above the level that was reached."""
PLACES = ".places.xz"
"""Suffix of the file with a routed netlist by place, which the bits of the open flow are compared with."""

_BLOCK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class BuildManifest:
    """Description of one build of a kernel for a board. Raises BitstreamError for an entry that cannot be."""

    board: str
    config: str
    """Full name of the build configuration."""
    digest: str
    """SHA-256 (hex) of that configuration: KernelConfig.digest."""
    design: str
    """SHA-256 (hex) of the design that was built, its git revision as 0: equal designs have equal ones."""
    git: str
    """Revision of the sources, 40 hex digits; its first 32 bits are in the identity registers."""
    tools: Mapping[str, str]
    """Version of each tool by name."""
    files: Mapping[str, str]
    """SHA-256 (hex) of each file beside the manifest, by name."""
    utilisation: Resources
    clock_hz: int
    """Clock that the bitstream is meant to run at, Hz: at most `derating` of fmax_hz."""
    fmax_hz: int
    """Highest clock of the timing model, Hz; 0 where none was computed."""
    critical_path: tuple[str, ...]
    """Cells along the longest path, by the signals that they drive, from register to register."""
    evidence: str
    """One of EVIDENCE."""
    logic_depth: float = 0.0
    """LUT levels of the longest path, as Yosys estimates them; 0 where it was routed."""
    timing_model: str = "none"
    """What computed fmax_hz, and what it leaves out; `none` where nothing did."""
    derating: float = 1.0
    """Fraction of fmax_hz that the clock keeps to, for what the timing model leaves out."""
    decoded_fmax_hz: int = 0
    """Highest clock of the netlist that the bitstream decodes to, Hz, by prjxray's delays; 0 where not computed."""
    decoded_path: tuple[str, ...] = ()
    """Its critical path: nets by place, with their arrival."""
    late_endpoints: int = 0
    """Its setup checks that fail at clock_hz."""
    hold_violations: int = 0
    """Its hold checks that fail."""

    def __post_init__(self) -> None:
        digests = {"digest": self.digest, "design": self.design, **self.files}
        if wrong := [name for name, value in digests.items() if not _SHA256.fullmatch(value)]:
            raise BitstreamError(f"manifest: {wrong[0]} must be a SHA-256, 64 hex digits, not {digests[wrong[0]]!r}")
        if hidden := [name for name in self.files if Path(name).name != name or name in (".", "..")]:
            raise BitstreamError(f"manifest: files must be names of files beside it, not {hidden[0]!r}")
        if self.evidence not in EVIDENCE:
            raise BitstreamError(f"manifest: evidence must be one of {', '.join(EVIDENCE)}, not {self.evidence!r}")
        if not 0 < self.derating <= 1:
            raise BitstreamError(f"manifest: derating must be above 0 and at most 1, not {self.derating}")
        if self.fmax_hz and self.clock_hz > self.fmax_hz * self.derating:
            share = "" if self.derating == 1 else f"{self.derating} of "
            raise BitstreamError(
                f"manifest: clock_hz must be at most {share}fmax_hz, {self.fmax_hz}, not {self.clock_hz}"
            )

    @property
    def kernel(self) -> str:
        """The kernel's name. Raises ConfigError for a configuration that does not exist."""
        return config(self.config).kernel

    @property
    def label(self) -> Label:
        """Label that its .bit file states."""
        return Label(self.kernel, self.config, self.digest, self.design)

    @property
    def folder(self) -> Path:
        """Folder of the manifest and its files."""
        return load_board(self.board).folder

    def file(self, suffix: str) -> Path:
        """Path of the one file with that suffix (`.bit`). Raises BitstreamError where the manifest has none."""
        names = [name for name in self.files if Path(name).suffix == suffix]
        if len(names) != 1:
            raise BitstreamError(f"{self.board}/{self.kernel} must have one {suffix} file, not {len(names)}")
        return self.folder / names[0]

    def verify(self) -> None:
        """Check the configuration's digest, then every file, then what those of a routed build state of themselves.

        Raises DigestError where this checkout has another configuration of that name, BitstreamError for a file that
        is missing, not the one that was built, or of another part, kernel, configuration, register map or clock.
        """
        expected = config(self.config).digest
        if self.digest != expected:
            raise DigestError(
                f"{self.board}/{self.kernel} must be a build of {self.config} with digest {expected[:16]}, not "
                f"{self.digest[:16]}; run `make bitstream BOARD={self.board} KERNEL={self.kernel}`"
            )
        for name, wanted in self.files.items():
            path = self.folder / name
            if not path.is_file():
                raise BitstreamError(f"{path} must exist; run `make bitstream BOARD={self.board} KERNEL={self.kernel}`")
            if (digest := sha256(path)) != wanted:
                raise BitstreamError(f"{path} must have the SHA-256 of its manifest, {wanted[:16]}, not {digest[:16]}")
        if EVIDENCE.index(self.evidence) >= EVIDENCE.index("routed"):
            self._check_contents(load_board(self.board))

    def _check_contents(self, board: Board) -> None:
        """Check what the files state of themselves: a manifest alone could name any file."""
        build = config(self.config)
        if board.flow == "vitis":
            check_xclbin(self.file(".xclbin"))
            return
        check_bit(self.file(".bit"), board, self.label)
        check_handoff(self.file(".hwh"), board, build, self.clock_hz)

    def check_limits(self, board: Board) -> None:
        """Compare with the board's limits. Raises BitstreamError for a build that uses more, or is slower."""
        limits = board.limits.get(self.kernel)
        if limits is None:
            return
        for name, used in asdict(self.utilisation).items():
            if used > (most := getattr(limits, name)):
                raise BitstreamError(f"{board.name}/{self.kernel}: {name} must be at most {most}, not {used}")
        if limits.logic_depth and self.logic_depth > limits.logic_depth:
            path = " > ".join(self.critical_path)
            raise BitstreamError(f"{board.name}/{self.kernel}: logic_depth must be at most {limits.logic_depth}, "
                                 f"not {self.logic_depth}: {path}")  # fmt: skip
        if self.fmax_hz < limits.fmax_hz:
            raise BitstreamError(
                f"{board.name}/{self.kernel}: fmax_hz must be at least {limits.fmax_hz}, not {self.fmax_hz}"
            )

    def to_json(self) -> str:
        """The manifest's text."""
        return json.dumps(asdict(self), indent=2) + "\n"


def sha256(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def load_manifest(board: Board, kernel: str) -> BuildManifest:
    """The manifest of a board's kernel, its files unchecked.

    Raises ConfigError for a kernel that the board does not have, BitstreamError for a manifest that is missing (it
    states how to build one), malformed, or of another board or configuration.
    """
    build: KernelConfig = board.build(kernel)
    path = board.folder / f"{kernel}.json"
    if not path.exists():
        raise BitstreamError(f"{path} must exist; run `make bitstream BOARD={board.name} KERNEL={kernel}`")
    manifest = TableReader(BitstreamError, rule).parse(
        BuildManifest, read_json(path, BitstreamError), f"{path}: manifest"
    )
    if (manifest.board, manifest.config) != (board.name, build.full_name):
        stated = f"{manifest.config} for {manifest.board}"
        raise BitstreamError(f"{path} must be of {build.full_name} for {board.name}, not of {stated}")
    return manifest
