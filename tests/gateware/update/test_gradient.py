"""The gradient source, dense and Top-K commands in turn."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import ConfigError
from nearflash.abi.topk import ValueFormat
from nearflash.gateware.update.gradient import GradientSource
from nearflash.model.gradients.topk import expand
from nearflash.sim.pysim.harness import run_streams
from nearflash.sim.stalls import STALLS
from nearflash.verify.fixtures.gradients import random_stream

LANES, PORT_BYTES = 2, 16


@pytest.fixture
def topk(small):
    return replace(small, gradients=("fp32", "topk"))


def beats(data):
    padded = data.ljust(-(-len(data) // PORT_BYTES) * PORT_BYTES, b"\xff")
    return [int.from_bytes(padded[at : at + PORT_BYTES], "little") for at in range(0, len(padded), PORT_BYTES)]


def groups(dense):
    padded = dense.tobytes().ljust(-(-dense.size // LANES) * 4 * LANES, b"\0")
    rows = [int.from_bytes(padded[at : at + 4 * LANES], "little") for at in range(0, len(padded), 4 * LANES)]
    return [{"data": row, "last": index == len(rows) - 1} for index, row in enumerate(rows)]


@pytest.mark.parametrize("stalls", STALLS)
def test_dense_and_topk_commands_in_turn(topk, stalls):
    """Streams whose words end within a beat, and dense gradients that end within a group."""
    rng = np.random.default_rng(1)
    commands, given, expected = [], [], []
    for params, density in ((6, None), (35, 0.5), (4, None), (9, 0.0), (17, 1.0), (8, None)):
        data = rng.standard_normal(params).astype(np.float32).tobytes()
        dense = np.frombuffer(data, np.float32)
        if density is not None:
            data = random_stream(rng, params, density, ValueFormat.BF16)
            dense = expand(data, params)
        command = {"groups": -(-params // LANES), "params": params, "topk": density is not None}
        commands.append({**command, "stream_bytes": len(data) if density is not None else 0})
        given += beats(data)
        expected += groups(dense)
    found = run_streams(GradientSource(topk), {"i_command": commands, "i": given}, {"o": len(expected)}, stalls=stalls)
    assert found["o"] == expected


def test_a_build_without_topk_has_no_expander(small):
    data = np.arange(4, dtype=np.float32)
    command = {"groups": 2, "params": 4, "topk": 0, "stream_bytes": 0}
    found = run_streams(GradientSource(small), {"i_command": [command], "i": beats(data.tobytes())}, {"o": 2})
    assert found["o"] == groups(data)


def test_topk_takes_up_to_four_lanes(small):
    with pytest.raises(ConfigError, match="gradients must be fp32, and topk with up to 4 lanes, not"):
        replace(small, lanes=8, port_bits=512, gradients=("fp32", "topk"))
