"""Programs of Debian sid: what apt is called with, what is kept, and the reasons where they cannot be had."""

import stat

import pytest

from nearflash.boards.open import packages
from nearflash.boards.open.packages import (
    PACKAGES,
    SidPrograms,
    ToolsError,
    fetch,
    find_programs,
    mirror,
    package_versions,
    run_logged,
    sid_root,
)

ARCHIVES = ("nextpnr-himbaechel-xilinx_0.11.1+dfsg-5+b1_amd64.deb", "prjxray_0.1_amd64.deb", "zlib1g_1%3a1.3_amd64.deb",
            "prjxray-database_0.1~db-4_all.deb")  # fmt: skip
APT = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *indextargets*) printf '{targets}';;
  *update*) test -z "{no_network}" || {{ echo "E: Failed to fetch"; exit 100; }};;
  *install*) for name in {names}; do touch {cache}/$name; done;;
esac
"""
DPKG = """#!/bin/sh
mkdir -p $3/usr/bin && touch $3/usr/bin/$(basename $2 | cut -d_ -f1)
"""
TARGETS = r"Packages|Debian|main|bookworm-security|http://mirror/security/\nPackages|Debian|main|bookworm|http://mirror/debian/\n"


@pytest.fixture
def apt(tmp_path, monkeypatch):
    """Stand-ins of apt-get and dpkg-deb, first on the path; returns how to set them up, and the folder of packages."""
    folder, programs = tmp_path / "sid", tmp_path / "bin"
    programs.mkdir()
    keyring = tmp_path / "keyring.gpg"
    keyring.write_text("")
    monkeypatch.setattr(packages, "_KEYRING", keyring)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def make(targets=TARGETS, no_network=""):
        text = APT.format(log=tmp_path / "calls", targets=targets, no_network=no_network, names=" ".join(ARCHIVES),
                          cache=folder / "cache/archives")  # fmt: skip
        for name, content in (("apt-get", text), ("dpkg-deb", DPKG)):
            (programs / name).write_text(content)
            (programs / name).chmod(stat.S_IRWXU)
        return folder

    return make


def test_packages_come_from_the_systems_mirror_into_a_private_folder(apt, tmp_path):
    folder = apt()
    programs = fetch(folder)
    assert programs.versions == {
        "nextpnr-himbaechel-xilinx": "0.11.1+dfsg-5+b1",
        "prjxray": "0.1",
        "prjxray-database": "0.1~db-4",
    }
    assert sorted(path.name for path in (programs.root / "usr/bin").iterdir()) == [
        "nextpnr-himbaechel-xilinx", "prjxray", "prjxray-database", "zlib1g"
    ]  # fmt: skip
    sources = (folder / "sid.sources").read_text()
    assert "URIs: http://mirror/debian/\nSuites: sid\n" in sources
    for call in (tmp_path / "calls").read_text().splitlines()[1:]:
        places = {"State": "state", "State::status": "status", "Cache": "cache", "Etc::sourcelist": "sid.sources"}
        for option, place in places.items():
            assert f"Dir::{option}={folder}/{place}" in call
        assert "Dir::Etc::sourceparts=-" in call
    assert all(name in call for name in PACKAGES)


def test_what_was_fetched_is_not_fetched_again(apt, tmp_path):
    folder = apt()
    assert find_programs(folder) is None
    first = fetch(folder)
    (tmp_path / "calls").unlink()
    assert fetch(folder) == first == find_programs(folder)
    assert not (tmp_path / "calls").exists()


def test_without_a_network_the_reason_is_apts_and_nothing_is_left_that_counts(apt):
    folder = apt(no_network="yes")
    with pytest.raises(ToolsError, match=r"(?s)needs nextpnr.* of Debian sid, which could not be had: apt-get failed"
                                         r" \(100\); .*E: Failed to fetch"):  # fmt: skip
        fetch(folder)
    assert find_programs(folder) is None
    assert fetch(apt()).root.is_dir()


@pytest.mark.parametrize("targets", ["", r"Packages|Ubuntu|main|noble|http://mirror/ubuntu/\n"])
def test_a_system_without_a_debian_archive_is_no_mirror(apt, targets):
    apt(targets=targets)
    with pytest.raises(ToolsError, match="this system's apt has no Debian archive"):
        mirror()


def test_a_system_without_apt_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(packages, "_KEYRING", tmp_path / "none.gpg")
    with pytest.raises(ToolsError, match=r"a Debian system to fetch them, but has no apt-get, dpkg-deb, .*none\.gpg"):
        fetch(tmp_path / "sid")


def test_versions_are_those_of_the_archives(tmp_path):
    names = ["zlib1g_1%3a1.3.dfsg_amd64.deb", "lock", "media-types_14.0.0_all.deb"]
    assert package_versions([tmp_path / name for name in names]) == {"zlib1g": "1:1.3.dfsg", "media-types": "14.0.0"}


def test_programs_run_with_their_own_loader(tmp_path):
    command = SidPrograms(tmp_path, {}).command("bitread", "-y", tmp_path / "x.bit")
    usr = f"{tmp_path}/usr"
    loader = [f"{usr}/lib64/ld-linux-x86-64.so.2", "--library-path", f"{usr}/lib/x86_64-linux-gnu"]
    assert command == [*loader, f"{usr}/bin/bitread", "-y", f"{tmp_path}/x.bit"]


def test_a_program_that_fails_is_named_with_the_end_of_its_output(tmp_path):
    root = tmp_path / "root"
    loader = root / "usr/lib64/ld-linux-x86-64.so.2"
    loader.parent.mkdir(parents=True)
    loader.write_text('#!/bin/sh\necho "home $PYTHONHOME"; test "$4" = good || { echo no luck; exit 3; }\n')
    loader.chmod(stat.S_IRWXU)
    programs = SidPrograms(root, {})
    assert programs.run("bitread", "good", log=tmp_path / "log") == f"home {root}/usr\n"
    with pytest.raises(ToolsError, match=r"(?s)bitread failed \(3\); .*log ends:\n.*no luck"):
        programs.run("bitread", "bad", log=tmp_path / "log")
    with pytest.raises(ToolsError, match="nowhere must run"):
        run_logged([str(tmp_path / "nowhere")], tmp_path / "log")


def test_a_program_is_ended_when_its_output_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "_LOOK_S", 0.05)
    shell = ["sh", "-c", "echo again; exec sleep 600"]
    assert run_logged(shell, tmp_path / "log", stop=lambda text: "again" in text) == "again\n"


def test_a_program_that_ends_by_itself_fails_as_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "_LOOK_S", 0.05)
    with pytest.raises(ToolsError, match=r"sh failed \(3\); .*log ends:\nbroken"):
        run_logged(["sh", "-c", "echo broken; exit 3"], tmp_path / "log", stop=lambda text: False)


def test_a_device_that_nextpnr_does_not_know_lists_those_that_it_does(tmp_path):
    folder = tmp_path / "usr/share/nextpnr/himbaechel/xilinx"
    folder.mkdir(parents=True)
    for device in ("xc7z020", "xc7a50t"):
        (folder / f"chipdb-{device}.bin").write_text("")
    programs = SidPrograms(tmp_path, {})
    assert programs.chip_database("xc7z020") == folder / "chipdb-xc7z020.bin"
    with pytest.raises(ToolsError, match="device must be one of xc7a50t, xc7z020, not 'xc7z045'"):
        programs.chip_database("xc7z045")
    assert programs.bit_database("zynq7") == tmp_path / "usr/share/prjxray/database/zynq7"


def test_the_private_folder_is_the_users_cache_or_what_the_environment_states(monkeypatch, tmp_path):
    monkeypatch.delenv("NEARFLASH_SID", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert sid_root() == tmp_path / "nearflash" / "sid"
    monkeypatch.setenv("NEARFLASH_SID", str(tmp_path / "elsewhere"))
    assert sid_root() == tmp_path / "elsewhere"
