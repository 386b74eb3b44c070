"""The build cache: one build for many callers, nothing left of a failed one, and the key of a cached design."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from amaranth.hdl import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.sim.cache import cached
from nearflash.sim.verilator.verilog import cached_design, convert


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NEARFLASH_CACHE", str(tmp_path / "cache"))


class Inverter(wiring.Component):
    i: In(70)
    o: Out(70)

    def elaborate(self, platform):
        m = Module()
        m.d.comb += self.o.eq(~self.i)
        return m


def test_many_callers_build_once():
    # Each call opens the lock file itself, so threads exclude each other just as processes do.
    builds = []

    def build(folder):
        builds.append(folder)
        time.sleep(0.2)
        (folder / "result").write_text("complete")

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: cached("slow", ["a"], build), range(4)))
    assert len(builds) == 1
    assert len(set(folders)) == 1
    assert (folders[0] / "result").read_text() == "complete"


def test_a_failed_build_does_not_count():
    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("tool failed")

    with pytest.raises(RuntimeError, match="tool failed"):
        cached("thing", ["a"], fail)
    folder = cached("thing", ["a"], lambda work: (work / "whole").write_text("whole"))
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert cached("thing", ["b"], lambda work: None) != folder


def test_a_cached_design_is_the_converted_one():
    def never():
        raise AssertionError("the component must not be made again")

    fresh, stored, found = convert(Inverter()), cached_design("inverter", Inverter), cached_design("inverter", never)
    for design in (stored, found):
        assert (design.digest, design.ports, design.streams) == (fresh.digest, fresh.ports, fresh.streams)
        assert design.read_rtlil() == fresh.read_rtlil()
    assert [(port.name, port.width, port.is_input, port.words) for port in found.ports] == [
        ("i", 70, True, 3),
        ("o", 70, False, 3),
    ]
