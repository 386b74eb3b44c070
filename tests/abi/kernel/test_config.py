"""Build configurations: rules between parameters, and digests that tell configurations apart."""

from dataclasses import replace

import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.kernel.config import CONFIGS, attend_config, config, config_of, expand_config, update_config
from nearflash.abi.registers import REGISTER_MAPS, UPDATE


def test_an_unknown_name_lists_what_exists() -> None:
    with pytest.raises(
        ConfigError,
        match=r"one of .*update-tiny, update-tiny-delta, update-tiny-split, update-zynq7010, not 'update-huge'",
    ):
        config("update-huge")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lanes": 3}, "lanes must be a power of two up to 8, not 3"),
        ({"port_bits": 96}, "port_bits must be 64, 128, 256 or 512"),
        ({"lanes": 8, "port_bits": 256}, "port_bits must be"),
        ({"burst_bytes": 8192}, "burst_bytes must be a divisor of 4096"),
        ({"port_bits": 64, "lanes": 1, "burst_bytes": 4096}, "burst_bytes must be a divisor of 4096 of 1 to 256 beats"),
        ({"outstanding_bursts": 0}, "outstanding_bursts must be between 1 and 32, not 0"),
        ({"state_formats": ("bf16",)}, "state_formats must be fp32 alone, or fp32, bf16, mx8, not"),
        ({"masters": ("split",)}, "masters must be fp32 alone, or fp32, split, not"),
        ({"delta": True, "lanes": 8, "gradients": ("fp32",)}, "delta must be False but for up to 4 lanes, not True"),
    ],
)
def test_parameters_that_do_not_fit_together_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIGS["update-smartssd"], **change)


def test_every_change_of_a_parameter_changes_the_digest() -> None:
    base = CONFIGS["update-smartssd"]
    changed = [replace(base, lanes=2), replace(base, port_bits=256), replace(base, clock_hz=1), replace(base, name="x")]
    assert len({c.digest64 for c in (base, *changed)}) == 5


def test_a_build_without_deltas_has_the_digest_from_before_there_were_any() -> None:
    """Of the committed bitstream."""
    base = CONFIGS["update-pynq-z2"]
    assert base.digest64 == 0xBB7A999E66391785
    assert replace(base, delta=True, name="pynq-z2").digest64 != base.digest64


def test_a_build_without_split_masters_has_the_map_and_the_digest_from_before_there_were_any() -> None:
    base, split = CONFIGS["update-tiny"], CONFIGS["update-tiny-split"]
    assert replace(split, name="tiny", masters=("fp32",)).digest == base.digest
    assert base.registers is UPDATE and base.digest64 == 0x6D8D65FFE1B7D9BD
    assert [r for r in split.registers if r.name in UPDATE] == list(UPDATE)
    assert "rest_address" in split.registers and "rest_address" not in base.registers
    assert all(build.registers is REGISTER_MAPS[build.kernel] for build in CONFIGS.values()
               if "split" not in getattr(build, "masters", ()))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 0}, "channels must be between 1 and 16, not 0"),
        ({"channels": 17}, "channels must be between 1 and 16, not 17"),
        ({"heads_per_beat": 3}, "heads_per_beat must be a power of two, 1 to 8, not 3"),
        ({"contexts": 128}, "contexts must be a power of two, 1 to 64, not 128"),
        ({"gather_slots": 64}, "gather_slots must be a power of two, 1 to 32, not 64"),
        ({"query_rows": 32}, "query_rows must be a power of two, 64 to 4096, not 32"),
        ({"score_blocks": 32}, "score_blocks must be a power of two, 1 to 16, not 32"),
        ({"score_entries": 1000}, "score_entries must be a power of two, 1024 to 1048576, not 1000"),
        ({"selector_keys": 128}, "selector_keys must be a power of two, 256 to 131072, not 128"),
        ({"luns": 1}, "luns must be 0 or a power of two, 2 to 64, not 1"),
        ({"luns": 128}, "luns must be 0 or a power of two, 2 to 64, not 128"),
        ({"page_bytes": 2048}, "page_bytes must be a power of two, 4096 to 16384, not 2048"),
        ({"port_bits": 96}, "port_bits must be 64, 128, 256 or 512, not 96"),
        ({"mask_beats": 32}, "mask_beats must be 0 or a power of two, 64 to 32768, not 32"),
        ({"mask_beats": 1000}, "mask_beats must be 0 or a power of two, 64 to 32768, not 1000"),
    ],
)
def test_parameters_of_an_attend_build_that_do_not_fit_together(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(attend_config("attend-zynq7045"), **change)


def test_a_name_is_of_its_kernel() -> None:
    finders = {"update": update_config, "attend": attend_config, "expand": expand_config}
    for name, one in CONFIGS.items():
        assert finders[one.kernel](name) is config(name) is one
        assert one.full_name == name
        assert config_of(one.kernel, name) is config_of(one.kernel, one.name) is one
        for kernel, find in finders.items():
            if kernel != one.kernel:
                with pytest.raises(ConfigError, match=f"configuration must be one of {kernel}-.*, not '{name}'"):
                    find(name)


def test_ports_of_the_kernels() -> None:
    assert {name: (one.ports, one.port_bytes) for name, one in CONFIGS.items() if one.name in ("tiny", "smartssd")} == {
        "update-tiny": (4, 8),
        "update-smartssd": (4, 64),
        "attend-tiny": (1, 8),
        "attend-smartssd": (1, 64),
        "expand-tiny": (2, 8),
        "expand-smartssd": (2, 64),
    }


def test_digests_differ_and_begin_the_identity() -> None:
    digests = [one.digest for one in CONFIGS.values()]
    assert len(set(digests)) == len(digests)
    assert all(f"{one.digest64:016x}" == one.digest[:16] and len(one.digest) == 64 for one in CONFIGS.values())
