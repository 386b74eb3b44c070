"""A card as NVMe host: published rates, whole sectors, and the path drive to kernel to drive without host bytes."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import AddressError
from nearflash.abi.optimizers import AdamStep, SgdStep, StateFormat
from nearflash.device.registry import open_device
from nearflash.device.selftest.update import UpdateVector, random_state, run_update
from nearflash.sim.nvme import CLOCK_HZ, SECTOR_BYTES, NvmeHost, command_cycles, update_on_drive

PARAMS = 1280
RULE = AdamStep(1e-3, 10, weight_decay=0.01)
SECTORS = {"g": 3, "p": 20, "m": 40, "v": 60}


def drive_with(state):
    """A drive with g, p, m, v at SECTORS, ones elsewhere."""
    drive = np.full(100 * SECTOR_BYTES, 1, np.uint8)
    for name, values in zip("gpmv", state, strict=True):
        start = SECTORS[name] * SECTOR_BYTES
        drive[start : start + values.nbytes] = values.view(np.uint8)
    return drive


def stored(drive, name):
    start = SECTORS[name] * SECTOR_BYTES
    return drive[start : start + 4 * PARAMS].tobytes()


def test_rates_are_the_published_ones():
    """83 + 18.8 n cycles: 2.7 GB/s at 8 KiB, as LiteNVMe's authors measured to 1 %."""
    assert command_cycles(1) == 101.8 and command_cycles(16) == 383.8
    host = NvmeHost(np.zeros(1 << 20, np.uint8))
    host.read(0, np.empty(1 << 20, np.uint8))
    assert host.commands == 128 and host.read_bytes == 1 << 20
    assert host.read_bytes * CLOCK_HZ / host.cycles == pytest.approx(2.69e9, rel=0.01)


def test_a_rest_is_a_command_of_its_own():
    host = NvmeHost(np.arange(10 * SECTOR_BYTES).astype(np.uint8), command_bytes=4 * SECTOR_BYTES)
    memory = np.zeros(6 * SECTOR_BYTES, np.uint8)
    host.read(2, memory)
    assert (memory == host.drive[2 * SECTOR_BYTES : 8 * SECTOR_BYTES]).all()
    assert host.commands == 2 and host.cycles == command_cycles(4) + command_cycles(2)
    host.write(0, memory[:SECTOR_BYTES] + 1)
    assert (host.drive[:SECTOR_BYTES] == memory[:SECTOR_BYTES] + 1).all() and host.written_bytes == SECTOR_BYTES


@pytest.mark.parametrize(("sector", "size"), [(-1, 512), (9, 1024), (0, 100), (11, 0)])
def test_transfers_lie_on_the_drive(sector, size):
    host = NvmeHost(np.zeros(10 * SECTOR_BYTES, np.uint8))
    for move in (host.read, host.write):
        with pytest.raises(AddressError, match=r"a transfer must be whole sectors of the drive's 5120 bytes, not \["):
            move(sector, np.zeros(size, np.uint8))
    assert host.commands == 0 and host.cycles == 0


def test_sizes_are_whole_sectors():
    with pytest.raises(AddressError, match=r"drive must be whole sectors of 512 bytes, not 100 bytes"):
        NvmeHost(np.zeros(100, np.uint8))
    for size in (0, 100, 1 << 19):
        with pytest.raises(
            AddressError, match=rf"command_bytes must be whole sectors of up to 262144 bytes, not {size}"
        ):
            NvmeHost(np.zeros(512, np.uint8), size)


@pytest.fixture(params=["model:update-tiny", "verilator:update-tiny"])
def device(request):
    with open_device(request.param) as opened:
        yield opened


def test_the_whole_path_equals_the_model_without_host_bytes(device):
    """State goes from the drive through the kernel to the drive; the host sends commands."""
    state = random_state(np.random.default_rng(5), PARAMS)
    with open_device("model:update-tiny") as model:
        expected, _ = run_update(model, UpdateVector(RULE, PARAMS), state)
    drive = drive_with(state)
    before = drive.copy()
    host = NvmeHost(drive)
    report = update_on_drive(device, host, RULE, SECTORS, PARAMS, chunk=512)
    for name in "pmv":
        assert stored(drive, name) == expected[name], name
    assert report.host_bytes == 0 and device.links.to_device == device.links.from_device == 0
    assert host.read_bytes == 16 * PARAMS and host.written_bytes == 12 * PARAMS
    changed = np.zeros(drive.size, bool)
    for name in "pmv":
        changed[SECTORS[name] * SECTOR_BYTES :][: 4 * PARAMS] = True
    assert (drive[~changed] == before[~changed]).all(), "g and all other sectors stay"


def test_the_report_adds_up(device):
    state = random_state(np.random.default_rng(6), PARAMS)
    host = NvmeHost(drive_with(state), command_bytes=1024)
    report = update_on_drive(device, host, RULE, SECTORS, PARAMS, chunk=1024)
    assert report.commands == 7 * (4 + 1) and report.drive_cycles == 35 * command_cycles(2)
    if device.identity.name.startswith("verilator"):
        assert report.kernel_cycles >= PARAMS, "one lane"
    slower = max(report.drive_cycles, report.kernel_cycles)
    assert report.params_per_s == PARAMS * CLOCK_HZ / slower


def test_a_rule_with_fewer_arrays_moves_less():
    rule = SgdStep(0.1, 10)
    host = NvmeHost(drive_with(random_state(np.random.default_rng(7), PARAMS)))
    with open_device("model:update-tiny") as device:
        update_on_drive(device, host, rule, SECTORS, PARAMS, chunk=PARAMS)
    assert (host.read_bytes, host.written_bytes) == (8 * PARAMS, 4 * PARAMS)


def test_bad_numbers_move_nothing():
    drive = drive_with(random_state(np.random.default_rng(8), PARAMS))
    host, before = NvmeHost(drive), drive.copy()
    with open_device("model:update-tiny") as device:
        for params, chunk in ((PARAMS + 4, 128), (PARAMS, 100), (PARAMS, 0)):
            with pytest.raises(AddressError, match=r"params and chunk must be multiples of 128, not "):
                update_on_drive(device, host, RULE, SECTORS, params, chunk)
        with pytest.raises(AddressError, match=r"state on the drive must be fp32, not bf16"):
            update_on_drive(device, host, replace(RULE, state_format=StateFormat.BF16), SECTORS, PARAMS, 128)
    assert host.commands == 0 and (drive == before).all()
