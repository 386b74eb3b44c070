"""The demo from end to end on a tiny model; `make demo` runs the real one."""

import json

import pytest

from nearflash.demo import run
from nearflash.demo.__main__ import main
from nearflash.device import open_device
from nearflash.device.backends.host.update import HostDevice
from nearflash.storage import StateStore


def test_report_and_files(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["rtl_steps"] == 3 and len(report["loss"]) == 6
    assert report["mismatches"] == 0
    assert report["words_compared"] == (6 * 4 + 3) * report["params"]  # p, m, v, copy; p, m, v once more on resuming
    assert report["torch_rel_error"] <= 1e-6
    link = report["host_link_bytes_per_param"]
    assert 4 <= link < 4.01  # the rate is so high that all weights change: copies, and headers of deltas
    assert report["conventional_host_link_bytes_per_param"] == 24
    assert 28 <= report["device_bytes_per_param"] < 28.01
    assert report["text_loss_after"] < report["text_loss_before"]
    assert (report["rtl_device"], report["profile"]) == ("model:update-tiny", "ieee")
    events = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "step" for event in events) == 6
    assert (tmp_path / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    with StateStore.open(tmp_path / "out" / "optimizer.state") as state:
        assert state.steps == 6 and state.verify() == []
    printed = capsys.readouterr().out
    assert "17 % of that" in printed and "[3/3] host:update-tiny  step 6" in printed


def test_a_second_run_starts_afresh(arguments, tmp_path):
    assert main(arguments) == 0
    assert main(arguments) == 0
    with StateStore.open(tmp_path / "out" / "optimizer.state") as state:
        assert state.steps == 6


def test_a_wrong_word_fails_the_demo(arguments, monkeypatch, capsys):
    """One flipped bit in one result of the device, and the demo says so."""

    class Wrong(HostDevice):
        commands = 0

        def _finish(self, timeout_s):
            Wrong.commands += 1
            address, _ = self._jobs[0].command.writes()["m"]
            completion = super()._finish(timeout_s)
            if Wrong.commands == 2:
                self.memory.view(address + 40, 1)[0] ^= 1
            return completion

    monkeypatch.setattr(run, "open_device", lambda name, _: Wrong.open(name.split(":")[1]))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("demo failed: ") and "words differ from nearflash.model" in error


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--rtl-device", "fpga:update-tiny", "UnknownDeviceError: device must be one of"),
        ("--model", "/nowhere", "StateError: /nowhere must hold a transformers model"),
        ("--window", "100000", "StateError: the text must have at least 100000 tokens"),
    ],
)
def test_bad_options(arguments, capsys, option, value, message):
    assert main([*arguments, option, value]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch", "--window", "--rtl-steps", "--lr"])
def test_counts_that_mean_nothing(arguments, capsys, option):
    with pytest.raises(SystemExit) as raised:
        main([*arguments, option, "-1" if option in ("--rtl-steps", "--lr") else "0"])
    assert raised.value.code == 2 and f"argument {option}: must be a " in capsys.readouterr().err


def test_no_waves_without_gateware(tmp_path):
    with open_device("model:update-tiny") as device:
        assert not run.record_waves(device, tmp_path / "update.vcd")
