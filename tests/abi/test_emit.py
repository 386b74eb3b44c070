"""Generated headers are valid C and C++ and say what the tables say."""

import json
import subprocess
from pathlib import Path

from nearflash.abi.emit import outputs
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
