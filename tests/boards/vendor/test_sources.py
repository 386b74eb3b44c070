"""Files of a kernel for other people's designs and testbenches."""

import json
import re

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.boards.vendor import sources
from nearflash.boards.vendor.fusesoc import LINT_WAIVERS
from nearflash.verify.lint import WAIVERS
from nearflash.verify.vendor.netlist import verilog_ports

BUILD = CONFIGS["update-tiny-split"]


@pytest.fixture(scope="module")
def written(shell, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "hdl" / "update"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "convert_kernel", lambda build: shell(build.full_name))
        paths = sources.write_sources(BUILD.full_name, folder)
    assert sorted(paths) == sorted(folder.iterdir())
    return {path.name: path for path in paths}


def test_the_json_has_the_ports_of_the_verilog(written):
    stated = json.loads(written["update.json"].read_text())["ports"]
    ports = {name: (f"{port['direction']}put", port["bits"]) for name, port in stated.items()}
    assert ports == verilog_ports(written["update.v"], "update")
    assert {"ap_clk", "ap_rst_n", "interrupt", "s_axi_control_awaddr", "m_axi_gmem3_wdata"} <= ports.keys()


def test_the_json_has_the_registers_of_the_build(written):
    stated = json.loads(written["update.json"].read_text())
    assert stated["config"]["digest"] == BUILD.digest
    assert {name: (each["offset"], each["width_bits"]) for name, each in stated["registers"].items()} == {
        register.name: (register.offset, register.width_bits) for register in BUILD.registers
    }
    defines = dict(re.findall(r"#define NEARFLASH_UPDATE_(\w+) 0x(\w+)u ", written["nearflash_abi.h"].read_text()))
    assert {name: int(defines[name.upper()], 16) for name in stated["registers"]} == {
        name: each["offset"] for name, each in stated["registers"].items()
    }


def test_the_core_names_files_that_are_there(written):
    marker, _, text = written["update.core"].read_text().partition("\n")
    core = json.loads(text)
    assert marker == "CAPI=2:" and core["name"].startswith("nearflash:kernel:update:")
    assert set(core["filesets"]["rtl"]["files"]) <= written.keys()
    assert {target["toplevel"] for target in core["targets"].values()} == {"update"}
    assert f"{BUILD.digest64:016x}" in core["description"]


def test_lint_lets_through_what_is_no_fault():
    assert set(LINT_WAIVERS) < {waiver.rule for waiver in WAIVERS}


def test_an_unknown_build_writes_nothing(tmp_path):
    with pytest.raises(ConfigError, match=r"configuration must be one of .*, not 'update-nope'"):
        sources.write_sources("update-nope", tmp_path / "hdl")
    assert not list(tmp_path.iterdir())
