"""NAND parts: descriptions as TOML beside this file, one a part, a lun in every key and a source for every figure."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from nearflash.abi.attention.codeword import CODEWORD_BYTES, RAW_BYTES
from nearflash.abi.errors import ConfigError
from nearflash.abi.nand import NandTiming

__all__ = ["NandPart", "nand_part", "nand_parts"]

_FOLDER = Path(__file__).parent / "parts"


@dataclass(frozen=True)
class NandPart:
    """One kind of NAND behind a channel."""

    name: str
    source: str
    page_bytes: int
    spare_bytes: int
    pages_per_block: int
    blocks: int
    """Blocks of one lun."""
    luns: int
    """LUNs (LUNs, or planes that read independently) of one channel."""
    timing: NandTiming
    jitter: float = 0.1
    """Share by which array times are shorter at most."""

    @property
    def raw_page_bytes(self) -> int:
        """Bytes of a page, spare included."""
        return self.page_bytes + self.spare_bytes

    @property
    def codewords(self) -> int:
        """Raw codewords that fit a page with its spare."""
        return self.raw_page_bytes // RAW_BYTES

    def check(self, page_bytes: int) -> None:
        """Raises ConfigError where pages of `page_bytes` (a build's, without spare) do not fit this part's."""
        needed = page_bytes // CODEWORD_BYTES * RAW_BYTES
        if needed > self.raw_page_bytes:
            raise ConfigError(
                f"page and spare of {self.name} must hold {page_bytes // CODEWORD_BYTES} raw codewords, {needed} bytes,"
                f" not {self.raw_page_bytes}: build for smaller pages"
            )


def nand_parts() -> tuple[str, ...]:
    """Names of all parts."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def nand_part(name: str) -> NandPart:
    """The part of that name. Raises ConfigError that lists what exists, or names the key that is wrong."""
    if name not in nand_parts():
        raise ConfigError(f"part must be one of {', '.join(nand_parts())}, not {name!r}")
    values = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    try:
        timing = NandTiming(**values.pop("timing"))
        return NandPart(name=name, timing=timing, **values)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"part {name} must have the keys of NandPart and NandTiming: {error}") from None
