import pytest

from nearflash.abi.errors import ConfigError
from nearflash.sim.nand import parts
from nearflash.sim.nand.parts import nand_part, nand_parts


@pytest.mark.parametrize("name", nand_parts())
def test_every_part_loads_and_says_where_its_figures_come_from(name):
    part = nand_part(name)
    assert len(part.source) > 40 and part.luns >= 2 and part.timing.erase_ns >= 1


@pytest.mark.parametrize(
    ("name", "fits", "fails"),
    [
        ("slc-1400", 4096, 8192),
        ("page16k-1400", 16384, 32768),
        ("mqsim-default", 4096, 8192),
        ("nvmevirt-970pro", 16384, 32768),
    ],
)
def test_pages_must_fit_with_their_codewords(name, fits, fails):
    nand_part(name).check(fits)
    with pytest.raises(ConfigError, match=f"^page and spare of {name} must hold {fails // 512} raw codewords"):
        nand_part(name).check(fails)


def test_an_unknown_part_lists_what_exists():
    with pytest.raises(ConfigError, match=r"^part must be one of .*slc-1400.*, not 'slc'$"):
        nand_part("slc")


def test_a_wrong_key_is_named(tmp_path, monkeypatch):
    (tmp_path / "odd.toml").write_text('source = "here"\npage_kb = 4\n[timing]\nread_ns = 1\n')
    monkeypatch.setattr(parts, "_FOLDER", tmp_path)
    with pytest.raises(ConfigError, match="part odd must have the keys of NandPart and NandTiming"):
        nand_part("odd")
