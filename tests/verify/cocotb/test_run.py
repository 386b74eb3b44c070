"""The cocotb runner: testbenches pass, and failures, missing timeouts and unknown units are reported as such."""

import sys
from types import ModuleType

import cocotb
import pytest

from nearflash.gateware.stream.queue import StreamQueue
from nearflash.verify.cocotb import run as cocotb_run
from nearflash.verify.cocotb.run import find_testbenches, run_testbench

pytest.importorskip("cocotb_tools.runner")


@pytest.mark.full
@pytest.mark.parametrize("parameters", [{}, {"memory": "block", "depth": 7}])
def test_queue(parameters):
    result = run_testbench("gateware.stream.queue", parameters=parameters)
    assert result.failed == ()
    assert len(result.passed) == 3


@pytest.mark.full
def test_a_wrong_component_fails_and_leaves_waves(monkeypatch):
    # The tests expect 5 places; the component of this run has 4.
    monkeypatch.setattr("nearflash.verify.cocotb.stream.queue.component", lambda: StreamQueue(32, 4))
    result = run_testbench("gateware.stream.queue", waves=True)
    assert result.failed == ("it_holds_depth_items",)
    assert set(result.passed) == {"items_leave_in_order", "reset_empties_it"}
    assert "i__payload" in result.wave_path.read_text()
    assert "it_holds_depth_items" in result.log_path.read_text()


def test_unknown_unit():
    with pytest.raises(ValueError, match=r"unit must be one of .*gateware.stream.queue.*, not 'gateware.nothing'"):
        run_testbench("gateware.nothing")


def test_a_test_must_have_a_timeout(monkeypatch):
    module = ModuleType("nearflash.verify.cocotb.endless")

    @cocotb.test()
    async def endless(dut):
        pass

    module.endless = endless
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cocotb_run, "find_testbenches", lambda: [*find_testbenches(), "gateware.endless"])
    with pytest.raises(ValueError, match=r"test endless of nearflash.verify.cocotb.endless must have a timeout"):
        run_testbench("gateware.endless")
