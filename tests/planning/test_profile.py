from dataclasses import replace

import pytest

from nearflash.abi.errors import PlanError
from nearflash.planning.profile import DeviceTier, DiskRate, list_machines, load_machine, machine_toml, parse_machine

DEVICE = DeviceTier("data sheet", 1e12, 10e9, 2e9, 3e9, 0.125)
RATE = DiskRate("read", True, 1 << 20, 4, 2.5e9)


def test_every_profile_that_comes_along_is_read_and_has_sources():
    assert "t4" in list_machines()
    for name in list_machines():
        machine = load_machine(name)
        assert machine.name == name
        assert all(len(part.source) > 10 for part in (machine.memory, machine.links, machine.compute))


def test_a_profile_survives_its_file(t4, tmp_path):
    full = replace(t4, name='a "name"\\ \n', device=DEVICE, rates=(RATE, replace(RATE, direct=False)))
    file = tmp_path / "machine.toml"
    file.write_text(machine_toml(full))
    assert load_machine(file) == full
    bare = replace(t4, disk=None)
    assert parse_machine(machine_toml(bare)) == bare


def test_other_budgets_leave_the_rest(t4):
    smaller = t4.with_memory(gpu_bytes=1e9)
    assert smaller.memory.gpu_bytes == 1e9 and smaller.memory.host_bytes == t4.memory.host_bytes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('format = "nearflash machine"', 'format = "x"', "must begin with format"),
        ("version = 1", "version = 2", "version = 1"),
        ('name = "t4"', "name = 3", "must have a name, not 3"),
        ("[memory]", "[memories]", r"must have a table \[memory\]"),
        ("gpu_bytes = ", "gpu_gb = ", "memory must have gpu_bytes"),
        ("[links]", "[links]\nmore = 1", "links must have only .* not more"),
        ("[links]", "[other]\n[links]", "must have only memory, .* not other"),
        ("direct = false", 'direct = "no"', "disk.direct must be true or false"),
        ("exposed_weight_loads = 1.0", "exposed_weight_loads = 1.5", "must be between 0 and 1, not 1.5"),
        ("per_layer_s = 0.0", "per_layer_s = -1.0", "must be 0 or more, not -1.0"),
        ("read_weights_bytes_per_s = 2400000000.0", "read_weights_bytes_per_s = 0", "must be above 0, not 0"),
        ("read_weights_bytes_per_s = 2400000000.0", "read_weights_bytes_per_s = nan", "must be above 0, not nan"),
        ("read_weights_bytes_per_s = 2400000000.0", "read_weights_bytes_per_s = true", "must be a number, not True"),
        ("request_bytes = 1048576", "request_bytes = 1.5", "rates.request_bytes must be a whole number, not 1.5"),
        ("[memory]", "[memory", "must be TOML"),
        ("read_weights_bytes_per_s = 2400000000.0", "read_weights_bytes_per_s = inf", "must be 1e.24 at most, not inf"),
        ("read_weights_bytes_per_s = 2400000000.0", f"read_weights_bytes_per_s = 0x{'f' * 5000}", "too long to show"),
        ("read_weights_bytes_per_s = 2400000000.0", f"read_weights_bytes_per_s = 1{'0' * 5000}", "must be TOML"),
        ("read_weights_bytes_per_s = 2400000000.0", "read_weights_bytes_per_s = 1e-300", "must be 1e-24 or more"),
        ("version = 1", "version = true", "version = 1"),
        ("[memory]", "a = " + "[" * 9999 + "\n[memory]", "must be TOML"),
    ],
)
def test_other_files_are_rejected(t4, old, new, message):
    text = machine_toml(replace(t4, rates=(RATE,)))
    assert old in text
    with pytest.raises(PlanError, match=message):
        parse_machine(text.replace(old, new, 1))


def test_a_list_where_a_table_belongs_is_rejected(t4):
    text = 'format = "nearflash machine"\nversion = 1\nname = "x"\n'
    with pytest.raises(PlanError, match="memory must be a table, not 3"):
        parse_machine(text + "memory = 3\n")
    with pytest.raises(PlanError, match="rates must be a list"):
        parse_machine(text + "rates = 3\n")


def test_names_and_files_that_do_not_exist_are_rejected(tmp_path):
    with pytest.raises(PlanError, match=r"machine must be one of .*t4, or a readable TOML file, not 't5'"):
        load_machine("t5")
    with pytest.raises(PlanError, match="readable TOML file"):
        load_machine(tmp_path)
