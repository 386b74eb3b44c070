"""The selector's mask equals the model's, by count and by mass; its time depends only on the number of keys."""

import numpy as np
import pytest
from numpy.typing import NDArray

from nearflash.abi.attention.fixed_point import KEY_LOCAL
from nearflash.gateware.attention.select.select import RadixSelector
from nearflash.model.attention.select.select import select, select_mass
from nearflash.model.attention.select.selection import probability_keys, weights
from nearflash.sim.pysim.harness import run_streams, transfer_cycles
from nearflash.sim.stalls import STALLS

Keys = NDArray[np.uint16]


def beats(keys: Keys, local_entry: int = 1 << 20) -> list[dict[str, object]]:
    """Key beats of the entries; those from `local_entry` on are local."""
    items = []
    for start in range(0, len(keys), 4):
        four = keys[start : start + 4].tolist()
        items.append(
            {
                "keys": four + [0xABCD] * (4 - len(four)),
                "local": sum(1 << lane for lane in range(4) if start + lane >= local_entry),
                "valid": (1 << len(four)) - 1,
                "last": int(start + 4 >= len(keys)),
            }
        )
    return items


def masks(items: list[object], sizes: list[int]) -> list[list[bool]]:
    """The masks of selections of `sizes` entries from the mask beats of all of them."""
    found = []
    for size in sizes:
        own, items = items[: -(-size // 4)], items[-(-size // 4) :]
        assert [beat.last for beat in own] == [0] * (len(own) - 1) + [1]
        bits = [bool(beat.mask >> lane & 1) for beat in own for lane in range(4)]
        assert not any(bits[size:])
        found.append(bits[:size])
    return found


def cases() -> list[tuple[Keys, int]]:
    rng = np.random.default_rng(1)
    sizes = [1, 3, 4, 5, 64, 61, 57, 64, 30]
    keys = [rng.integers(0, 1 << 16, size).astype(np.uint16) for size in sizes]
    keys += [rng.integers(40000, 40003, 50).astype(np.uint16), np.full(41, 7, np.uint16), np.zeros(9, np.uint16)]
    keys += [np.full(13, 0xFFFF, np.uint16), rng.integers(0x1200, 0x12FF, 63).astype(np.uint16)]
    return [(k, count) for k in keys for count in {0, 1, len(k) // 3, len(k) - 1, len(k), 70}]


@pytest.mark.parametrize(
    ("stalls", "chosen"),
    [
        ("none", cases()[::7]),  # not a multiple of the counts: each count, and all kinds of keys
        pytest.param("none", cases(), marks=pytest.mark.full),
        *((name, cases()[20:30]) for name in list(STALLS)[1:]),
    ],
    ids=["none", "none, all cases", *list(STALLS)[1:]],
)
def test_equals_the_model(stalls, chosen):
    inputs = {
        "i_command": [{"count": count} for _, count in chosen],
        "i": [beat for keys, _ in chosen for beat in beats(keys)],
    }
    got = run_streams(RadixSelector(64), inputs, {"o": len(inputs["i"])}, stalls=stalls, timeout_cycles=100_000)["o"]
    assert masks(got, [len(keys) for keys, _ in chosen]) == [select(*case).tolist() for case in chosen]


def mass_cases() -> list[tuple[NDArray[np.int64], int, int, int]]:
    """(summed probabilities, first local entry, mass, cap)."""
    rng = np.random.default_rng(2)
    long_tailed = [(2.0 ** rng.normal(12, 4, size)).astype(np.int64) for size in (64, 50, 33, 8)]
    ties = [rng.choice([1000, 1001, 900], 60), np.full(31, 1 << 24), np.eye(1, 20, 3, dtype=np.int64)[0] << 27]
    return [
        (np.minimum(v, (1 << 27) - 1), local, mass, cap)
        for v in (*long_tailed, *ties)
        for local, mass, cap in ((64, 0xF333, 64), (len(v) - 3, 0x8000, 20), (len(v) - 6, 0xFFFF, 64), (5, 1, 3))
    ]


def test_mass_equals_the_model():
    chosen = mass_cases()[::3]
    inputs = {
        "i_command": [{"count": cap, "mass": mass} for _, _, mass, cap in chosen],
        "i": [beat for v, local, _, _ in chosen for beat in beats(probability_keys(v), local)],
    }
    got = run_streams(RadixSelector(64, weighted=True), inputs, {"o": len(inputs["i"])}, timeout_cycles=100_000)["o"]
    expected = []
    for v, local, mass, cap in chosen:
        keys = probability_keys(v)
        keys[local:] = KEY_LOCAL
        expected.append(select_mass(keys, weights(v), mass, cap).tolist())
    assert masks(got, [len(v) for v, *_ in chosen]) == expected
    assert {sum(mask) for mask in expected} > {1, 3, 20}


def test_time_does_not_depend_on_the_keys():
    selector = RadixSelector(256)
    for keys, count in ((np.arange(200, dtype=np.uint16), 17), (np.full(200, 9, np.uint16), 200)):
        inputs = {"i_command": [{"count": count}], "i": beats(keys)}
        cycles = transfer_cycles(RadixSelector(256), inputs, {"o": 50}, timeout_cycles=5000)
        assert cycles["o"][-1] - cycles["i"][-1] == selector.settled_cycles + 2 * 50
    assert selector.settled_cycles <= 600
    assert RadixSelector(256, weighted=True).settled_cycles <= 600


@pytest.mark.parametrize("entries", [4, 12])
def test_entries_message(entries):
    with pytest.raises(ValueError, match=f"entries must be a power of two, at least 8, not {entries}"):
        RadixSelector(entries)


@pytest.mark.parametrize("options", [{"key_bits": 7}, {"key_bits": 18}, {"key_bits": 8, "weighted": True}])
def test_key_bits_message(options):
    with pytest.raises(ValueError, match="key_bits must be even, 2 to 16, and 16 with weights, not"):
        RadixSelector(8, **options)
