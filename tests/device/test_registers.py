"""The register driver against a register file whose kernel ends as it is told."""

import pytest

from nearflash.abi import ABI_VERSION
from nearflash.abi.attention.batch import AttendBatch
from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.errors import CommandError, DeviceError, DigestError, WaitTimeoutError
from nearflash.abi.fields import Access
from nearflash.abi.kernel.commands import Status, UpdateCommand
from nearflash.abi.kernel.config import CONFIGS
from nearflash.abi.optimizers import AdamStep
from nearflash.abi.registers import MAGIC, REGISTER_MAPS, UPDATE
from nearflash.device.memory import SimulatedMemory
from nearflash.device.registers import RegisterDevice

CONFIG = CONFIGS["update-tiny"]
DONE, START, CONTINUE = 2, 1, 16


class FakeKernel(RegisterDevice):
    """Runs for `polls` pauses, then ends with `ends`; reading control clears ap_done, as ap_ctrl_chain says."""

    CONFIG, TYPE = CONFIG, "update_type"

    def __init__(self, polls=3, ends=None, **registers):
        self.words, self.map = {}, REGISTER_MAPS[self.CONFIG.kernel]
        identity = {
            "magic": MAGIC,
            "abi_version": ABI_VERSION,
            "config_digest": self.CONFIG.digest64,
            "git_revision": 0xABCD,
        }
        for name, value in (identity | {self.TYPE: self.map[self.TYPE].reset} | registers).items():
            self.set(name, value)
        self.polls, self.ends, self.left, self.log, self.resets = polls, ends or {}, None, [], 0
        super().__init__("fake", self.CONFIG, SimulatedMemory(1 << 20))

    @classmethod
    def open(cls, config):
        raise NotImplementedError

    def set(self, name, value):
        offset = self.map[name].offset
        self.words[offset], self.words[offset + 4] = value & 0xFFFFFFFF, value >> 32 or self.words.get(offset + 4, 0)

    def get(self, name):
        register = self.map[name]
        high = self.words.get(register.offset + 4, 0) << 32 if register.width_bits == 64 else 0
        return self.words.get(register.offset, 0) | high

    def read_register(self, offset):
        value = self.words.get(offset, 0)
        if offset == 0:
            self.words[0] = value & ~DONE
        return value

    def write_register(self, offset, value):
        self.log.append((offset, value))
        if offset:
            self.words[offset] = value
        elif value & START:
            assert not self.words.get(0, 0) & DONE, "started before the last completion was acknowledged"
            self.left = self.polls

    def pause(self):
        self.stand()
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                for name, value in self.ends.items():
                    self.set(name, value)
                self.words[0], self.left = DONE, None

    def stand(self):
        self.set("wait_g_cycles", self.get("wait_g_cycles") + 7)
        self.set("wait_write_cycles", self.get("wait_write_cycles") + 1)

    def reset_kernel(self):
        self.resets += 1
        self.left = None


class FakeAttendKernel(FakeKernel):
    CONFIG, TYPE = CONFIGS["attend-tiny"], "attend_type"

    def stand(self):
        self.set("waiting", 1 | 1 << 4 | 0b101 << 16)


def command(device) -> UpdateCommand:
    a = device.allocate(8 * 4096).address
    inputs = {name: a + i * 4096 for i, name in enumerate(("g", "p", "m", "v"))}
    return UpdateCommand(AdamStep(1e-3, 1), 1000, inputs, {name: inputs[name] for name in ("p", "m", "v")})


def test_a_command_is_written_then_started_and_its_counters_come_back():
    device = FakeKernel(ends={"cycles": 1 << 33, "params_done": 1000})
    one = command(device)
    completion = device.run(one)
    assert completion.counters["cycles"] == 1 << 33 and completion.counters["params_done"] == 1000
    assert {name: device.get(name) for name in one.registers()} == one.registers()
    starts = [i for i, write in enumerate(device.log) if write == (0, START)]
    assert starts == [sum(UPDATE[name].width_bits // 32 for name in one.registers())]
    assert device.log[-1] == (0, CONTINUE)
    device.run(one)


def test_only_arguments_are_written():
    device = FakeKernel()
    writable = {UPDATE[name].access for name in command(device).registers()}
    assert writable == {Access.RW}


def test_identity():
    identity = FakeKernel().identity
    assert (identity.name, identity.digest64, identity.git_revision) == ("fake:update-tiny", CONFIG.digest64, 0xABCD)


@pytest.mark.parametrize(("name", "value"), [("magic", 0xFFFFFFFF), ("abi_version", 77), ("update_type", 0)])
def test_another_kernel_is_refused(name, value):
    with pytest.raises(DigestError, match=rf"register {name} of fake:update-tiny must be 0x.*, not {value:#x}: load"):
        FakeKernel(**{name: value})


def test_another_configuration_is_refused_with_both_digests():
    other = CONFIGS["update-smartssd"].digest64
    with pytest.raises(DigestError, match=f"must be {CONFIG.digest64:016x}, not {other:016x}: .*build it again"):
        FakeKernel(config_digest=other)


@pytest.mark.parametrize("status", [s for s in Status if s])
def test_faults_name_status_address_and_advice(status):
    device = FakeKernel(ends={"status": status, "fault_address": 0x1_2345_6000})
    with pytest.raises(DeviceError, match=rf"ended with {status.name} at address 0x123456000: \w.* \w"):
        device.run(command(device))
    device.ends = {"status": 0, "params_done": 5}
    assert device.run(command(device)).counters["params_done"] == 5


def test_an_unknown_status_is_still_a_fault():
    device = FakeKernel(ends={"status": 99})
    with pytest.raises(DeviceError, match="status 99 at address 0x0: this host does not know"):
        device.run(command(device))


def test_a_timeout_names_the_streams_that_wait():
    device = FakeKernel(polls=10**9)
    ticket = device.submit(command(device))
    with pytest.raises(
        WaitTimeoutError, match=r"within 0\.01 s; it still runs and waits for g, write: wait for longer"
    ):
        device.wait(ticket, timeout_s=0.01)
    device.reset()
    with pytest.raises(CommandError, match="ticket"):
        device.wait(ticket)
    device.polls = 2
    device.run(command(device))
    device.close()
    assert device.resets == 2


def test_a_timeout_of_a_kernel_that_says_what_waits():
    device = FakeAttendKernel(polls=10**9)
    a = device.allocate(8 * 4096).address
    head = AttendDescriptor(
        Mode.DENSE, PageTag(0, 0, 0), 64, 16, 1, 0, 0, 0, 16, False, 0, 0, 4096, 1.0,
        *(a + i * 4096 for i in range(5)),
    )  # fmt: skip
    ticket = device.submit(AttendBatch((head,), a + 5 * 4096, a + 6 * 4096, contexts=4))
    with pytest.raises(WaitTimeoutError, match="waits for memory, gather, channels 0x5: wait for longer"):
        device.wait(ticket, timeout_s=0.01)


def test_a_command_for_another_kernel_is_refused():
    with pytest.raises(CommandError, match="must go to an update kernel, not to attend-tiny"):
        FakeAttendKernel().submit(command(FakeKernel()))
