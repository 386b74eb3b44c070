"""A kernel between its bridges, Verilated behind a stand-in for the processor system: equal to the model to the bit."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.kernel.config import config, expand_config, update_config
from nearflash.abi.optimizers import AdamStep
from nearflash.boards.zynq7.system import CONTROL_ADDRESS, ZynqSystem
from nearflash.device.drivers.expand import expand_matrix
from nearflash.device.memory import SimulatedMemory
from nearflash.device.registers import RegisterDevice
from nearflash.device.selftest.expand import MATRIX_FORMATS, format_name, random_matrix
from nearflash.device.selftest.update import UpdateVector, random_state, run_update
from nearflash.gateware.bus.axi import Axi4Signature, AxiLiteSignature
from nearflash.model.update.lane import optimizer_step
from nearflash.model.weights.bitmap import expand
from nearflash.sim.verilator.device import QUIET_CYCLES, VerilatorDevice
from nearflash.sim.verilator.kernel import KernelLibrary, MemoryModel
from nearflash.sim.verilog import convert

IDENTIFIER = 0xA5C


class ProcessorStandIn(wiring.Component):
    """What the simulator drives as a bare kernel: registers through gp0, AXI3 memory ports as AXI4."""

    def __init__(self, build, hp_ports):
        self.system = ZynqSystem(build, 0x1234_5678, hp_ports=hp_ports)
        ports = {f"m_axi_gmem{index}": Out(Axi4Signature(64)) for index in range(len(self.system.ports))}
        super().__init__({"s_axi_control": In(AxiLiteSignature(12)), **ports, "interrupt": Out(1)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.system = system = self.system
        gp0, control = system.gp0, self.s_axi_control
        for channel in ("aw", "ar"):
            values = {"addr": CONTROL_ADDRESS + getattr(control, f"{channel}addr"), "size": 2, "burst": 1,
                      "id": IDENTIFIER, "valid": getattr(control, f"{channel}valid")}  # fmt: skip
            m.d.comb += [getattr(gp0, channel + name).eq(value) for name, value in values.items()]
            m.d.comb += getattr(control, f"{channel}ready").eq(getattr(gp0, f"{channel}ready"))
        for name in ("wdata", "wstrb", "wvalid", "bready", "rready"):
            m.d.comb += getattr(gp0, name).eq(getattr(control, name))
        m.d.comb += gp0.wlast.eq(1)
        for name in ("wready", "bresp", "rdata", "rresp"):
            m.d.comb += getattr(control, name).eq(getattr(gp0, name))
        # A response that does not have the request's identifier is none.
        m.d.comb += [
            control.bvalid.eq(gp0.bvalid & (gp0.bid == IDENTIFIER)),
            control.rvalid.eq(gp0.rvalid & (gp0.rid == IDENTIFIER) & gp0.rlast),
        ]
        for index, inner in enumerate(system.hp):
            outer = getattr(self, f"m_axi_gmem{index}")
            for member, description in outer.signature.members.items():
                if hasattr(inner, member) and member not in ("rid", "bid"):
                    one, other = getattr(outer, member), getattr(inner, member)
                    m.d.comb += one.eq(other) if description.flow is Out else other.eq(one)
        m.d.comb += self.interrupt.eq(system.interrupt)
        return m


class WrappedDevice(VerilatorDevice):
    """The simulated device, with bridges between it and its registers and memory."""

    def __init__(self, build, hp_ports=2):
        self.kernel = KernelLibrary(
            convert(ProcessorStandIn(build, hp_ports)), f"zynq7-{build.full_name}-{hp_ports}", memory_bytes=1 << 20
        )
        memory = SimulatedMemory(base=self.kernel.base_address, storage=self.kernel.memory)
        RegisterDevice.__init__(self, "verilator", build, memory)
        self._quiet_cycles = QUIET_CYCLES
        self._enable_interrupt()


@pytest.fixture(
    scope="module",
    params=[1, 2, 4],
    ids=lambda count: f"{count} ports",
)
def device(request):
    with WrappedDevice(update_config("update-pynq-z2"), request.param) as opened:
        yield opened


@pytest.mark.full
@pytest.mark.parametrize("model", [MemoryModel(read_latency_cycles=40), MemoryModel(stall_percent=50, seed=3)])
def test_an_update_equals_the_model(device, model):
    params = 777
    rule = AdamStep(lr=1e-3, step=4, weight_decay=0.01)
    state = random_state(np.random.default_rng(1), params)
    device.kernel.configure(model)
    results, counters = run_update(device, UpdateVector(rule, params, CopyFormat.FP16), state)
    expected = optimizer_step(rule, *state, CopyFormat.FP16)
    assert counters["params_done"] == params
    for name in ("p", "m", "v", "copy"):
        assert results[name] == getattr(expected, name).tobytes(), name


@pytest.mark.full
def test_memory_sees_bursts_of_at_most_16_beats(device):
    before = device.kernel.statistics()
    rule, params = AdamStep(lr=1e-3, step=1), 1024
    run_update(device, UpdateVector(rule, params), random_state(np.random.default_rng(2), params))
    arrays = 4 // len(before)  # of g, p, m and v, those that a port reads
    for name, port in device.kernel.statistics().items():
        assert port.read_bursts - before[name].read_bursts >= arrays * 4 * params // 128, name


@pytest.mark.full
def test_the_identity_is_the_builds(device):
    assert device.identity.digest64 == update_config("update-pynq-z2").digest64
    assert device.identity.git_revision == 0x1234_5678


@pytest.fixture(scope="module")
def expander():
    with WrappedDevice(expand_config("expand-pynq-z2")) as opened:
        yield opened


@pytest.mark.full
@pytest.mark.parametrize("form", MATRIX_FORMATS, ids=format_name)
def test_a_weight_matrix_equals_the_model(expander, form):
    expander.kernel.configure(MemoryModel(stall_percent=30, seed=4))
    for shape in ((3, 70), (2, 2049)):
        stream = random_matrix(np.random.default_rng(5), shape, 0.5, form)
        np.testing.assert_array_equal(expand_matrix(expander, stream).dense, expand(stream))


@pytest.mark.parametrize("name", ["update-smartssd", "expand-smartssd"])
def test_a_build_with_wider_ports_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} must have ports of 64 bits for a Zynq-7000, not 512"):
        ZynqSystem(config(name))


@pytest.mark.parametrize("count", [0, 5])
def test_ports_that_a_processor_system_does_not_have_are_refused(count):
    with pytest.raises(ConfigError, match=f"hp_ports must be between 1 and 4, not {count}"):
        ZynqSystem(config("update-pynq-z2"), hp_ports=count)
