"""Subjects of the bench `fuzz`: transcripts, journals, and the small files of settings and results."""

import json
import random
import tomllib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nearflash.abi.attention.pages import IndexFormat
from nearflash.bench.storage.fuzz.mutations import (
    FILE,
    Files,
    FuzzedFormat,
    forge_json,
    json_pieces,
    line_pieces,
    text_files,
)
from nearflash.device import open_device
from nearflash.device.replay import RecordingDevice, ReplayDevice, seal_line
from nearflash.inference.policy.files import PolicyFile
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.offload.results import Results, prompt_digest
from nearflash.planning.plan_file import read_plan, write_plan
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine, machine_toml, parse_machine
from nearflash.planning.search import plan_for
from nearflash.planning.shapes import from_config
from nearflash.planning.terms import Workload
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.measure import Rate
from nearflash.storage.io.profile import find_profile, keep_profile
from nearflash.storage.kv import KvLayout, KvShape
from nearflash.storage.kv.journal import SequenceJournal, journal_line
from nearflash.storage.kv.sequence import Tags

__all__ = ["drives", "journal", "machine", "plan", "policy", "results", "transcript"]


def transcript(folder: Path) -> FuzzedFormat:
    """Calls of a device; others ask for the same and get other bytes."""

    def calls(device: Any, value: int = 7) -> object:
        with device:
            answers = []
            for turn in range(2):
                buffer = device.allocate(BLOCK_BYTES)
                buffer.host[:] = value + turn
                buffer.sync_to_device()
                buffer.sync_from_device()
                answers.append((buffer.address, buffer.host.tobytes()))
                device.free(buffer)
            return answers

    for value in (7, 9):
        calls(RecordingDevice(open_device("model:update-tiny"), folder / str(value)), value)
    own, other = ({FILE: (folder / str(value)).read_bytes()} for value in (7, 9))

    def forge(rng: random.Random) -> Files:
        texts = own[FILE].decode().splitlines()
        number = rng.randrange(len(texts))
        body = {name: value for name, value in json.loads(texts[number]).items() if name != "crc32"}
        forged = forge_json(body, rng)
        before = texts[number - 1] if number else ""
        texts[number] = seal_line(forged, before) if isinstance(forged, dict) else json.dumps(forged)
        return {FILE: "\n".join(texts).encode("ascii", "replace")}

    def read(folder: Path) -> object:
        return calls(ReplayDevice(folder / FILE, "update-tiny"))

    return FuzzedFormat(own, read, forge, line_pieces(own, [other]))


def journal(folder: Path) -> FuzzedFormat:
    """The journal of three sequences; others are of another opening of its copy, and another store's."""
    name, path = "0" * 32, folder / "journal"

    def live(path: Path, store: str, salt: int) -> None:
        own = SequenceJournal.create(path, store)
        for sequence in range(3):
            own.place(sequence, Tags((0,), (sequence,)), Tags((0,), (sequence,)))
            own.note(sequence, {"tokens": [5, 6, 7 + salt], "text": "one"})
            own.keep_partial_group(sequence, (23, 10 + sequence + salt))
        own.place(1, Tags((0, 2), (1, 4 + salt)), Tags((0, 1), (1, 4)))
        own.keep_partial_group(1, None)
        own.free(salt)
        own.close({2: (16, np.arange(3.0) + salt)})

    live(path, name, 0)
    others = []
    for number, store in enumerate(("1" * 32, "2" * 32), 1):
        live(folder / store, store, number % 2)
        others.append({FILE: (folder / store).read_bytes()})

    def read(folder: Path) -> object:
        return repr(SequenceJournal.read(folder / FILE, name))

    own = {FILE: path.read_bytes()}

    def forge(rng: random.Random) -> Files:
        bodies = [json.loads(line[9:]) for line in own[FILE].splitlines()]
        number, forged = rng.randrange(len(bodies)), b""
        bodies[number] = forge_json(bodies[number], rng)
        for body in bodies:
            forged += journal_line(body, name, len(forged))
        return {FILE: forged}

    older, lines = [], own[FILE].splitlines(keepends=True)
    for count in range(1, len(lines)):
        (folder / FILE).write_bytes(b"".join(lines[:count]))
        older.append(read(folder))
    return FuzzedFormat(own, read, forge, line_pieces(own, others), tuple(older))


def policy(folder: Path) -> FuzzedFormat:
    """A calibrated policy; another one is of another model of the same shape."""
    shape, digests = KvShape(3, 2, 64), ("0" * 16, "1" * 16)
    for number, digest in enumerate(digests):
        base = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=0.25, local_window=64 + 64 * number, keep_tail=True)
        heads: dict[int | tuple[int, int], AttentionPolicy] = {}
        for layer, head in np.ndindex(shape.layers, shape.kv_heads):
            heads[layer, head] = replace(base, score_dims=8 + head + 4 * number, top_p=0.9)
        layout = KvLayout(16, True, 1024, IndexFormat.INT4, 4096)
        made = PolicyFile(f"model {number}", digest, replace(base, overrides=heads), layout, 0.12, 0.001, "by hand")
        made.write(folder / str(number))
    return _json_subject(folder, lambda folder: PolicyFile.read(folder / FILE, shape, digests[0]))


def plan(folder: Path) -> FuzzedFormat:
    """A plan of an offloaded run; another one is for another model."""
    for number, layers in enumerate((4, 6)):
        shape = from_config(
            dict(hidden_size=256, num_hidden_layers=layers, num_attention_heads=8, ffn_dim=1024, vocab_size=512,
                 max_position_embeddings=2048, word_embed_proj_dim=256, activation_function="relu")
        )  # fmt: skip
        shares = Shares(gpu=1), Shares(host=1), Shares(gpu=1)
        chosen = OffloadPolicy(2 + number, 2, *shares)
        write_plan(plan_for(shape, load_machine("t4"), Workload(64, 16 + number), chosen), folder / str(number))
    return _json_subject(folder, lambda folder: read_plan(folder / FILE))


def drives(folder: Path) -> FuzzedFormat:
    """Rates of a drive, kept; others are of other measurements."""
    for number in range(2):
        rates = [Rate("read", 1 << 20, 2, 3.0 + number, 2.5, 4.5), Rate("random", 4096, 1, 0.05, 0.04, 0.06)]
        keep_profile(folder, rates, f"2026-02-0{3 + number}", folder / str(number))
    return _json_subject(folder, lambda folder: find_profile(folder, folder / FILE))


def _json_subject(folder: Path, read: Callable[[Path], object]) -> FuzzedFormat:
    """A file of JSON without checksums, `0` in the folder; another one is `1`."""
    own, other = (json.loads((folder / name).read_text()) for name in ("0", "1"))
    files = {FILE: (folder / "0").read_bytes()}
    return FuzzedFormat(
        files, read, lambda rng: text_files(forge_json(own, rng)), json_pieces(own, [other], text_files), sealed=False
    )


def machine(folder: Path) -> FuzzedFormat:
    """The profile of a machine; others are those that come with nearflash."""
    bodies = [tomllib.loads(machine_toml(load_machine(name))) for name in ("t4", "gpu24")]
    files = {FILE: machine_toml(load_machine("t4")).encode()}

    def read(folder: Path) -> object:
        return load_machine(folder / FILE)

    def forge(rng: random.Random) -> Files:
        return {FILE: _toml(forge_json(bodies[0], rng)).encode("utf-8", "replace")}

    def write(body: Any) -> Files:
        return {FILE: _toml(body).encode("utf-8", "replace")}

    assert parse_machine(_toml(bodies[0])) == parse_machine(files[FILE].decode())
    return FuzzedFormat(files, read, forge, json_pieces(bodies[0], bodies[1:], write), sealed=False)


def _toml(body: Any) -> str:
    """TOML of values, one inline table a key: what is none of TOML comes out as JSON has it, and is no TOML."""
    if not isinstance(body, dict):
        return json.dumps(body)
    return "".join(f"{json.dumps(str(key))} = {_value(value)}\n" for key, value in body.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_value(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_value, value)) + "]" if isinstance(value, list) else json.dumps(value)


def results(folder: Path) -> FuzzedFormat:
    """Results of a batch list; others are of another model for the same prompts, and of other prompts."""
    prompts = [[1, 2, number] for number in range(6)]
    settings = {"model": "a" * 16, "max_new_tokens": 4}
    runs = [
        (prompts, settings, 7),
        (prompts, settings | {"model": "b" * 16}, 8),
        ([[9, *p] for p in prompts], settings, 9),
    ]
    files = []
    for number, (rows, run_settings, token) in enumerate(runs):
        with Results(folder / str(number), [prompt_digest(row) for row in rows], run_settings) as out:
            for prompt in range(5):
                out.add({prompt: ([token, prompt], f"text {token} {prompt}")})
        files.append({FILE: (folder / str(number)).read_bytes()})

    def read(folder: Path) -> object:
        with Results(folder / FILE, [prompt_digest(row) for row in prompts], settings) as results:
            return dict(results.done)

    def forge(rng: random.Random) -> Files:
        lines = files[0][FILE].splitlines()
        number = rng.randrange(len(lines))
        body = json.loads(lines[number])
        body.pop("crc32", None)
        forged = forge_json(body, rng)
        if isinstance(forged, dict) and number:
            text = json.dumps(forged, sort_keys=True).encode()
            forged["crc32"] = zlib.crc32(text, zlib.crc32(lines[0]))
        lines[number] = json.dumps(forged).encode()
        return {FILE: b"\n".join(lines) + b"\n"}

    def accepts(results: Any, expected: Any) -> bool:
        """Lines at the end may be missing: those prompts are computed again."""
        return bool(results.items() <= expected.items())

    return FuzzedFormat(files[0], read, forge, line_pieces(files[0], files[1:]), accepts=accepts)
