"""A board of another machine: ssh, the server there, PYNQ's driver, a Verilated kernel, in a process of their own."""

import os
import sys

import numpy as np
import pytest

from nearflash.abi.errors import DeviceError
from nearflash.abi.optimizers import AdamStep
from nearflash.cli import main as cli
from nearflash.device import open_device
from nearflash.device.selftest.update import UpdateVector, random_state, run_update

pytest.importorskip("amaranth")
SSH = f"""#!{sys.executable}
import os, sys
*options, host, command = sys.argv[1:]
if (options[-1], host) != ("--", "localhost"):
    sys.exit(f"ssh: no route to {{host}}")
os.execvp("sh", ["sh", "-c", command])
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes `localhost` a board of PYNQ's own classes, or of a bare kernel where `how` says so."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")

    def make(how):
        server = f"{sys.executable} -W ignore -m nearflash.verify.fixtures.boards.process {how} {tmp_path}/board.lock"
        monkeypatch.setenv("NEARFLASH_DEVICE_SERVER", server)

    return make


def test_selftest_through_the_network(machine, capfd):
    machine("bare")
    assert cli.main(["selftest", "--device", "pynq:update-tiny@localhost", "--params", "40"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split(":")[0].split("  ")[0] for line in lines[:6]] == [
        "identity", "clock", "registers", "memory", "golden command", "bandwidth",
    ]  # fmt: skip
    assert "pynq:update-tiny@localhost, abi" in lines[0] and lines[1].endswith("for 100.0 MHz")
    assert lines[-1].startswith("pynq:update-tiny@localhost: ") and lines[-1].endswith(", 0 mismatches")


def test_one_client_has_the_board_and_a_second_one_learns_which_process(machine):
    machine("bare")
    state = random_state(np.random.default_rng(1), 100)
    with open_device("pynq:update-tiny@localhost") as device:
        with pytest.raises(DeviceError, match=r"held by one process, and process \d+ has it"):
            open_device("pynq:update-tiny@localhost")
        vector = UpdateVector(AdamStep(1e-3, 3, weight_decay=0.1), 100)
        found, counters = run_update(device, vector, state)
    with open_device("model:update-tiny") as model:
        assert found == run_update(model, vector, state)[0] and counters["params_done"] == 100
    open_device("pynq:update-tiny@localhost").close()


@pytest.mark.full
def test_a_training_step_through_the_network(machine, tmp_path):
    torch = pytest.importorskip("torch")
    from nearflash.training import NearStorageAdamW

    machine("bare")
    bits = []
    for device in ("model:update-tiny", "pynq:update-tiny@localhost"):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 3000))
        parameter.grad = torch.linspace(1, -2, 3000)
        path = tmp_path / device.partition(":")[0]
        with NearStorageAdamW([parameter], path=path, device=device, lr=1e-2) as optimizer:
            optimizer.step()
        bits.append(parameter.detach().numpy().tobytes())
    assert bits[0] == bits[1] != torch.linspace(-1, 1, 3000).numpy().tobytes()


@pytest.mark.full
@pytest.mark.parametrize(("kernel", "size"), [("update", ["--params", "100"]), ("expand", ["--columns", "200"])])
def test_the_bitstream_of_the_repository_through_pynq_and_the_network(machine, capfd, kernel, size):
    """As `make drivers` has it: PYNQ's Overlay, MMIO and allocate at the other end."""
    pytest.importorskip("pynq", reason="needs PYNQ in .venv-pynq: make drivers")
    machine("pynq")
    assert cli.main(["selftest", "--device", f"pynq:{kernel}-pynq-z2@localhost", *size]) == 0
    assert capfd.readouterr().out.endswith(", 0 mismatches\n")
