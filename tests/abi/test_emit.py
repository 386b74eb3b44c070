"""Generated headers are valid C and C++ and say what the tables say."""

import json
import subprocess
from pathlib import Path

import pytest

from nearflash.abi.emit import outputs
from nearflash.abi.emit.json import kernel_document
from nearflash.abi.kernel.commands import Status
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.registers import UPDATE


def _compile(tmp_path: Path, name: str, text: str, compiler: list[str], body: str) -> str:
    (tmp_path / name).write_text(text)
    source = tmp_path / f"main{'.c' if name.endswith('.h') else '.cpp'}"
    source.write_text(f'#include "{name}"\n#include <stdio.h>\nint main(void) {{ {body} return 0; }}\n')
    subprocess.run([*compiler, "-Wall", "-Werror", "-o", tmp_path / "main", source], check=True, capture_output=True)
    return subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout


def test_the_c_header_compiles_and_holds_offsets_and_digests(tmp_path: Path) -> None:
    body = 'printf("%u %llx", NEARFLASH_UPDATE_PARAMS, NEARFLASH_DIGEST_UPDATE_TINY);'
    printed = _compile(tmp_path, "nearflash_abi.h", outputs()["hls/include/nearflash_abi.h"], ["gcc", "-std=c99"], body)
    assert printed == f"{UPDATE['params'].offset} {CONFIGS['update-tiny'].digest64:x}"


def test_the_hls_header_compiles_and_holds_parameters(tmp_path: Path) -> None:
    body = 'printf("%d", (int)nearflash::update_smartssd::port_bits);'
    text = outputs()["hls/include/nearflash_config.hpp"]
    assert _compile(tmp_path, "nearflash_config.hpp", text, ["g++", "-std=c++14"], body) == "512"


def test_the_json_document_parses() -> None:
    configs = json.loads(outputs()["docs/contracts/abi.json"])["configs"]
    assert configs["update-tiny"]["digest"] == CONFIGS["update-tiny"].digest


@pytest.mark.parametrize("name", ["update-tiny", "expand-tiny", "attend-tiny"])
def test_a_kernels_document_has_one_build_its_ports_and_registers(name: str) -> None:
    build = CONFIGS[name]
    ports = {"ap_clk": ("in", 1), "m_axi_gmem0_WDATA": ("out", build.port_bytes * 8)}
    found = json.loads(kernel_document(build, ports))
    assert found["kernel"] == build.kernel and found["config"]["digest"] == build.digest
    assert found["ports"]["m_axi_gmem0_WDATA"] == {"direction": "out", "bits": build.port_bytes * 8}
    assert {register["offset"] for register in found["registers"].values()} == {r.offset for r in build.registers}
    assert found["registers"].keys() == {register.name for register in build.registers}
    assert found["status"] == {status.name: int(status) for status in Status}
