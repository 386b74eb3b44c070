"""Data files: units in every key, a source in every table, and nothing but what the kind has."""

import dataclasses
import tomllib
from importlib.resources import files

import pytest

from nearflash.abi.errors import PlanError
from nearflash.explore.energy import Energy
from nearflash.explore.links import DramMemory, Link
from nearflash.explore.processors import Cpu, Gpu, Host, Npu, Runtime
from nearflash.explore.shapes import Trained, list_trained
from nearflash.explore.ssd import Ssd
from nearflash.explore.studies.costs import Component
from nearflash.explore.studies.dse import FpgaBoard, Synthesis
from nearflash.explore.systems.ifc import Arrangement, Decode, Die
from nearflash.explore.systems.instinfer import Csd, KvShare
from nearflash.explore.systems.kvnand import decode_step
from nearflash.explore.systems.layered import Expander
from nearflash.explore.systems.nearflash import MeasuredHeads
from nearflash.explore.systems.smart_infinity import Buckets, OptimizerBytes, SmartSsd, Training, speed_up
from nearflash.explore.tables import UNITS, own_tables, part_names, read_part, table, what_if
from nearflash.explore.wear import Price

KINDS = (MeasuredHeads, Component, FpgaBoard, Buckets, Cpu, Csd, Die, Energy, Expander, Gpu, Host, Link, DramMemory,
         Npu, OptimizerBytes, Price, Runtime, KvShare, SmartSsd, Ssd, Synthesis)  # fmt: skip
TEXT = {"source", "date", "part", "digest", "drive", "interleaved"}


def hardware_files():
    folder = files("nearflash.explore") / "hardware"
    return {each.name: tomllib.loads(each.read_text("utf-8")) for each in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_part_is_read_to_the_last_key(kind):
    names = part_names(kind)
    assert names
    for name in names:
        part = read_part(kind, name)
        assert len(part.source) > 20, f"{name} states where it is from"


def test_every_file_has_its_kind():
    known = {f"{getattr(kind, 'FILE', kind.__name__.lower())}.toml" for kind in KINDS}
    assert set(hardware_files()) == known


@pytest.mark.parametrize("file", sorted(hardware_files()))
def test_every_number_has_a_unit_in_its_key(file):
    wrong = [
        f"{name}.{key}"
        for name, part in hardware_files()[file].items()
        for key in part.keys() - TEXT
        if not key.endswith(UNITS)
    ]
    assert not wrong


@pytest.mark.parametrize("file", sorted(hardware_files()))
def test_every_table_has_a_source(file):
    for name, part in hardware_files()[file].items():
        assert part.get("source", "").strip(), f"{file}: {name}"


def test_models_have_sources():
    for file in ("models.toml", "trained.toml"):
        for name, body in own_tables(".", file).items():
            assert body["source"].strip(), name
    assert {"opt-30b", "llama2-7b", "llama3.1-8b", "llama3.1-70b", "mixtral-8x7b"} <= set(
        own_tables(".", "models.toml")
    )
    assert list_trained()[0] == "gpt2-1.16b"
    assert list_trained()[-1] == "gpt2-33b"


def body(**changes):
    found = {"source": "a datasheet", "raw_bytes_per_s": 10e9, "reached_fraction": 0.5}
    return {key: value for key, value in (found | changes).items() if value is not ...}


def test_a_part_from_a_table():
    link = table(Link, body(), "mine")
    assert link.bytes_per_s == 5e9
    assert dataclasses.asdict(link) == body()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"raw_bytes_per_s": ...}, "mine must have raw_bytes_per_s"),
        ({"rate": 3}, "mine must have only source, raw_bytes_per_s, reached_fraction, not rate"),
        ({"raw_bytes_per_s": "fast"}, "mine.raw_bytes_per_s must be a number, not 'fast'"),
        ({"raw_bytes_per_s": True}, "mine.raw_bytes_per_s must be a number, not True"),
        ({"raw_bytes_per_s": float("nan")}, "mine.raw_bytes_per_s must be a number, not nan"),
        ({"raw_bytes_per_s": float("inf")}, "mine.raw_bytes_per_s must be a number, not inf"),
        ({"raw_bytes_per_s": 0}, "mine.raw_bytes_per_s must be above 0, not 0"),
        ({"raw_bytes_per_s": -1}, "mine.raw_bytes_per_s must be above 0, not -1"),
        ({"reached_fraction": 1.5}, "mine.reached_fraction must be between 0 and 1, not 1.5"),
        ({"source": ""}, "mine.source must be text, not ''"),
        ({"source": 3}, "mine.source must be text, not 3"),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(PlanError) as caught:
        table(Link, body(**changes), "mine")
    assert str(caught.value) == message


def test_a_part_that_is_no_table():
    with pytest.raises(PlanError, match="mine must be a table, not 7"):
        table(Link, 7, "mine")


def test_whole_numbers_stay_whole():
    known = dataclasses.asdict(read_part(Ssd, "mqsim-default"))
    with pytest.raises(PlanError, match=r"d.channels_count must be a whole number, not 2.5"):
        table(Ssd, known | {"channels_count": 2.5}, "d")


@pytest.mark.parametrize("value", [[], 3.0, ["one"], [1.0, -2.0]])
def test_lists_hold_numbers(value):
    known = dataclasses.asdict(read_part(MeasuredHeads, "slc-1400"))
    known = {key: list(each) if isinstance(each, tuple) else each for key, each in known.items()}
    assert table(MeasuredHeads, known, "a") == read_part(MeasuredHeads, "slc-1400")
    with pytest.raises(PlanError, match=r"a.head_cycles(\[\d\])? must be"):
        table(MeasuredHeads, known | {"head_cycles": value}, "a")


def test_an_unknown_part_names_those_that_exist():
    with pytest.raises(PlanError, match=r"gpu must be one of a100, a4000, a5000, a6000, rtx4080, t4, not 'h100'"):
        read_part(Gpu, "h100")


def test_a_file_of_yours(tmp_path):
    mine = tmp_path / "links.toml"
    mine.write_text('[usb]\nsource = "a cable"\nraw_bytes_per_s = 5e9\nreached_fraction = 0.8\n')
    assert read_part(Link, "usb", mine).bytes_per_s == pytest.approx(4e9)
    with pytest.raises(PlanError, match="link must be one of usb, not 'pcie4-x16'"):
        read_part(Link, "pcie4-x16", mine)


@pytest.mark.parametrize("content", [b"[usb\n", b"\xff\xfe", None])
def test_a_file_that_is_no_toml(tmp_path, content):
    mine = tmp_path / "links.toml"
    if content is not None:
        mine.write_bytes(content)
    with pytest.raises(PlanError, match="must be a readable TOML file"):
        read_part(Link, "usb", mine)


def test_a_trained_model_of_no_parameters():
    with pytest.raises(PlanError, match=r"m.parameters_count must be above 0, not 0"):
        table(Trained, {"source": "none", "parameters_count": 0}, "m")


def test_what_if_changes_a_part_for_a_while():
    before = read_part(Gpu, "a5000")
    with what_if({"gpu.a5000.memory_bytes_per_s": 1e12}):
        assert read_part(Gpu, "a5000") == dataclasses.replace(before, memory_bytes_per_s=1e12)
        assert read_part(Gpu, "a6000").memory_bytes_per_s == 768e9
        with what_if({"gpu.a5000.fp16_flops_per_s": 1e15}):
            both = read_part(Gpu, "a5000")
            assert (both.memory_bytes_per_s, both.fp16_flops_per_s) == (1e12, 1e15)
    assert read_part(Gpu, "a5000") == before


def test_what_if_reaches_every_system():
    """Also where a system keeps its parts, as kvnand does."""
    step = decode_step(Decode("llama2-7b", 1000), Arrangement("C", 8)).seconds
    with what_if({"die.kvnand.read_us": 8}):
        assert decode_step(Decode("llama2-7b", 1000), Arrangement("C", 8)).seconds > 1.8 * step
    assert decode_step(Decode("llama2-7b", 1000), Arrangement("C", 8)).seconds == step
    gain = speed_up(Training(method="SU"))
    with what_if({"smartssd.smartssd.write_bytes_per_s": 1.6e9}):
        assert speed_up(Training(method="SU")) != pytest.approx(gain, rel=0.01)


@pytest.mark.parametrize(
    "key", ["gpu.a5000", "gpu.h100.memory_bytes", "gpu.a5000.colour", "toaster.a.b", "", "gpu.a5000.source"]
)
def test_what_if_of_parts_that_are_not_there(key):
    with pytest.raises(PlanError, match="what-if must"):
        with what_if({key: 1.0}):
            pass


def test_what_if_keeps_the_rules_of_a_part():
    with what_if({"gpu.a5000.memory_bytes_per_s": -1}):
        with pytest.raises(PlanError, match=r"a5000.memory_bytes_per_s must be above 0, not -1"):
            read_part(Gpu, "a5000")
    assert read_part(Gpu, "a5000").memory_bytes_per_s > 0
