"""`nearflash kv verify`: what a file holds, also where its user was killed in the middle."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from nearflash.abi.attention.codeword import PageKind
from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import StateError
from nearflash.cli.main import main
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.flash.geometry import FlashGeometry
from nearflash.storage.kv import KvLayout, KvShape, KvStore
from nearflash.storage.kv.pages import PageMaker
from nearflash.storage.kv.verify import verify

SHAPE = KvShape(2, 3, 32)
SEPARATE = KvLayout(16, False, 64, IndexFormat.INT4, 4096)
GEOMETRY = FlashGeometry(4096, 256, 1, 1, 15)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def filled(path, draw):
    """A file of two sequences: 200 tokens in each layer; 100 tokens in layer 0 alone."""
    with KvStore(FileFlash.create(path, GEOMETRY), SHAPE, SEPARATE) as store:
        full, part = store.add(), store.add()
        for sequence, layer, tokens in ((full, 0, 200), (full, 1, 200), (part, 0, 100)):
            store.append(sequence, layer, *draw([sequence, layer], tokens, SHAPE))
    return path


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_file_that_cannot_be_written_is_read(filled, mount_read_only):
    mount_read_only(filled)
    assert main(["kv", "verify", str(filled)]) == main(["kv", "status", str(filled)]) == 0


def test_a_whole_file(filled, capsys):
    assert main(["kv", "verify", str(filled)]) == 0
    programmed = 3 * (2 * (12 * 2 + 3 * 4) + 6 * 2 + 1 * 4)
    assert capsys.readouterr().out.splitlines() == [
        "sequence 0: 192 tokens valid in every layer and head, up to 192 in some",
        "sequence 1: 0 tokens valid in every layer and head, up to 96 in some",
        f"{filled}: {programmed} pages valid, {15 * 256 - programmed} erased, 0 torn",
    ]
    assert main(["kv", "verify", "--json", str(filled)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": str(filled), "kind": "flash", "valid": programmed, "erased": 15 * 256 - programmed, "torn": [],
        "sequences": {"0": 192, "1": 0},
    }  # fmt: skip
    assert main(["kv", "status", "--json", str(filled)]) == 0
    assert json.loads(capsys.readouterr().out)["programmed"] == programmed
    assert main(["kv", "verify", "--heads", str(filled)]) == 0
    heads = capsys.readouterr().out.splitlines()[2:-1]
    assert len(heads) == 9 and heads[5] == "sequence 0, layer 1, head 2: 192 tokens valid, 192 indexed"
    found = verify(filled).heads[0, 1, 2]
    assert (found.tokens(SEPARATE), found.count_indexed(SEPARATE, 32)) == (192, 192)
    assert main(["kv", "status", str(filled)]) == 0
    assert f"3840 pages, {programmed} programmed" in capsys.readouterr().out


@pytest.mark.parametrize("key, names", [
    ((0, 1, 2, 5, 0, 8), r"sequence 0, layer 1, head 2, token page 5 \(V\), tokens \[80, 96\): page \d+, file offset"),
    ((1, 0, 0, 2, 1, 0), r"sequence 1, layer 0, head 0, index page 2, tokens \[0, 64\): page \d+"),
])  # fmt: skip
def test_a_torn_page_is_named(filled, capsys, key, names):
    with FileFlash.open(filled) as flash:
        keys, _, erased = flash.headers(np.arange(flash.geometry.pages))
        sequence, layer, head, index, kind, first = key
        same = (keys["sequence"] == sequence) & (keys["layer"] == layer) & (keys["head"] == head)
        pages = np.flatnonzero(~erased & same & (keys["index"] == index) & (keys["kind"] == kind))
        offset = flash.offset(int(pages[-1] if first else pages[0]))
    flip(filled, offset + 100)
    assert main(["kv", "verify", str(filled)]) == 1
    torn = [line for line in capsys.readouterr().out.splitlines() if line.startswith("TORN")]
    assert len(torn) == 1 and re.search(names, torn[0])
    found = verify(filled).heads[sequence, layer, head]
    assert found.tokens(SEPARATE) == (80 if kind == 0 else 96)


def test_a_record_without_header_is_torn(filled):
    with FileFlash.open(filled) as flash:
        zone = flash.offset(256) - 256 * 128
    flip(filled, zone + 4)
    assert verify(filled).torn == [f"a page without header: page 0, file offset {4096}"]


def test_what_is_no_kv_store_is_refused(path, tmp_path, capsys):
    FileFlash.create(path, GEOMETRY).close()
    with pytest.raises(StateError, match="the flash must hold a KV store"):
        verify(path)
    (tmp_path / "text").write_bytes(b"text" * 1024)
    assert main(["kv", "verify", str(tmp_path / "text")]) == 2
    assert "must begin with the superblock of a flash" in capsys.readouterr().err


WRITER = """
import sys
from pathlib import Path
import numpy as np
from nearflash.abi.attention.pages import IndexFormat
from nearflash.storage.flash.file import FileFlash
from nearflash.storage.kv import KvLayout, KvShape, KvStore
from nearflash.storage.flash.geometry import FlashGeometry

shape, layout = KvShape(2, 3, 32), KvLayout(16, False, 64, IndexFormat.INT4, 4096)
flash = FileFlash.create(Path(sys.argv[1]), FlashGeometry(4096, 256, 1, 1, 15), threads=3)
store = KvStore(flash, shape, layout, buffer_bytes=1 << 17, background=sys.argv[2] == "1")
heads, channels = np.arange(3)[:, None, None], np.arange(32)
print("ready", flush=True)
while True:
    number = store.add()
    for start in range(0, 800, 40):
        for layer in range(2):
            tokens = np.arange(start, start + 40)[:, None]
            k = ((number * 7 + layer * 5 + heads * 11 + tokens * 3 + channels) % 997).astype(np.float16)
            store.append(number, layer, k, -k)
    if number >= 2:
        store.free(number - 2)
"""


@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize("attempts", [2, pytest.param(3, marks=pytest.mark.full)])
def test_killed_while_it_writes(path, background, attempts):
    most = 0
    for attempt in range(attempts):
        process = subprocess.Popen([sys.executable, "-c", WRITER, path, str(background)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1 + 0.2 * attempt)
        with pytest.raises(StateError, match="in use by another process"):
            verify(path)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        found = verify(path)
        assert found.torn == []
        most = max(most, found.valid)
        check_contents(path)
    assert most > 100


def check_contents(path):
    """Every token page that is accepted holds what the writer computes for its key."""
    maker = PageMaker(SHAPE, SEPARATE)
    with FileFlash.open(path) as flash:
        pages = np.arange(flash.geometry.pages)
        keys, known, _ = flash.headers(pages)
        pages, keys = (x[known & (keys["kind"] == PageKind.TOKEN)] for x in (pages, keys))
        keys["first"] = np.where(pages % 2, SEPARATE.page_codewords, 0)
        values = maker.k_values(flash.read(pages, keys).data)
    whose = keys["sequence"] * np.int64(7) + keys["layer"] * np.int64(5) + keys["head"] * np.int64(11)
    tokens = keys["index"].astype(np.int64)[:, None] * 16 + np.arange(16)
    expected = (whose[:, None, None] + tokens[..., None] * 3 + np.arange(32)) % 997
    assert np.array_equal(values, np.where(keys["first"] > 0, -1, 1)[:, None, None] * expected)
