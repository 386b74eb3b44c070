"""What is the host device's own: threads, timeouts, abort. Its bits are compared in tests/system."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from nearflash.abi.delta import DeltaHeader
from nearflash.abi.errors import CommandError, StreamError, WaitTimeoutError
from nearflash.abi.kernel.commands import CopyFormat, GradientFormat, UpdateCommand
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, MasterFormat, Profile, SgdStep, StateFormat
from nearflash.abi.topk import ValueFormat
from nearflash.device import open_device
from nearflash.device.backends.host import update
from nearflash.device.backends.host.bf16 import bf16_values
from nearflash.device.backends.host.delta import apply_delta, changes_of, round_words
from nearflash.device.backends.host.topk import pack
from nearflash.device.backends.host.update import THREADS, HostDevice
from nearflash.device.backends.host.vector.lane import VectorLane
from nearflash.device.memory import SimulatedMemory
from nearflash.model.update.state import join_master, split_master

PARAMS = THREADS * VectorLane.BLOCK_PARAMS + 5


@pytest.fixture
def host():
    with HostDevice.open("update-tiny") as device:
        yield device


def in_place(device, params=PARAMS) -> UpdateCommand:
    state = {name: device.allocate(4 * params).address for name in ("p", "m", "v")}
    return UpdateCommand(AdamStep(1e-3, 1), params, state | {"g": device.allocate(4 * params).address}, state)


@pytest.fixture
def gate(monkeypatch):
    """Blocks wait until it is set, 30 s at most."""
    gate, step = threading.Event(), VectorLane.step
    monkeypatch.setattr(VectorLane, "step", lambda *arguments: gate.wait(30) and step(*arguments))
    yield gate
    gate.set()


def test_a_slow_update_times_out_and_can_be_waited_for_again(host, gate):
    ticket = host.submit(in_place(host))
    with pytest.raises(WaitTimeoutError, match=f"update of {PARAMS} parameters must end within 0.01 s; it still runs"):
        host.wait(ticket, timeout_s=0.01)
    gate.set()
    assert host.wait(ticket).counters["params_done"] == PARAMS


def test_submit_returns_at_once_and_commands_run_in_order(host, gate):
    """Three steps in place over the same arrays, submitted before the first has begun."""
    command = in_place(host)
    values = host.memory.view(*command.reads()["p"]).view("<f4")
    host.memory.view(*command.reads()["g"]).view("<f4")[:] = 1
    inputs, outputs = (
        {key: a for key, a in names.items() if key != "v"} for names in (command.inputs, command.outputs)
    )
    rules = [SgdStep(lr, step, momentum=0.5) for step, lr in ((1, 1.0), (2, 2.0), (3, 4.0))]
    tickets = [host.submit(replace(command, rule=rule, inputs=inputs, outputs=outputs)) for rule in rules]
    assert (values == 0).all()
    gate.set()
    for ticket in reversed(tickets):
        host.wait(ticket)
    assert (values == -(1 + 2 * 1.5 + 4 * 1.75)).all()


@pytest.mark.skipif(THREADS == 1, reason="one core: one thread, which one command takes")
def test_a_command_on_other_arrays_does_not_wait_for_one_that_is_held_up(host, monkeypatch):
    held, begun, step = threading.Event(), threading.Event(), VectorLane.step

    def hold(lane, inputs, *rest):
        if inputs["p"].size == 1024:
            begun.set()
            held.wait(30)
        return step(lane, inputs, *rest)

    monkeypatch.setattr(VectorLane, "step", hold)
    first, second = in_place(host, 1024), in_place(host, 2048)
    old, new = (host.memory.view(*command.writes()["p"]).view("<f4") for command in (first, second))
    host.memory.view(*second.reads()["g"]).view("<f4")[:] = 1
    tickets = [host.submit(first)]
    assert begun.wait(30)
    tickets.append(host.submit(second))
    until = time.monotonic() + 30
    while not new.all() and time.monotonic() < until:
        time.sleep(0.001)
    assert new.all() and not old.any()
    held.set()
    assert [host.wait(ticket).counters["params_done"] for ticket in tickets] == [1024, 2048]


def test_reset_aborts_between_blocks(host, gate):
    command = in_place(host)
    tickets = [host.submit(command) for _ in range(2)]
    opener = threading.Timer(0.1, gate.set)
    opener.start()
    host.reset()
    opener.join()
    for ticket in tickets:
        with pytest.raises(CommandError, match="ticket must be one"):
            host.wait(ticket)
    assert host.run(command).counters["params_done"] == PARAMS


@pytest.mark.parametrize("device", ["host", "model"])
def test_a_topk_gradient_is_expanded_and_a_damaged_one_changes_nothing(device):
    with open_device(f"{device}:update-tiny") as opened:
        command = in_place(opened, 5000)
        stream = pack(np.array([3, 4999]), np.float32([1, 2]).view(np.uint32), 5000, ValueFormat.FP32)
        memory = opened.memory.view(*command.reads()["g"])
        memory[: stream.size] = stream
        sparse = replace(command, gradient=GradientFormat.TOPK, gradient_bytes=stream.size)
        opened.run(replace(sparse, rule=AdamStep(1.0, 1, eps=0.25)))
        values = opened.memory.view(*command.reads()["p"]).view("<f4")
        assert np.flatnonzero(values).tolist() == [3, 4999]
        before = values.copy()
        memory[40] ^= 1
        with pytest.raises(StreamError):
            opened.run(sparse)
        assert (values == before).all()


def test_counts_add_up_over_threads(host):
    buffers = [host.allocate(4 * PARAMS) for _ in range(5)]
    for buffer, value in zip(buffers, (float("inf"), 1e6, 0, 0), strict=False):
        buffer.host.view("<f4")[:] = value
        buffer.sync_to_device()
    g, *rest = (buffer.address for buffer in buffers)
    outputs = dict(zip(("p", "m", "v", "copy"), rest, strict=True))
    inputs = {"g": g} | {name: outputs[name] for name in ("p", "m", "v")}
    command = UpdateCommand(AdamStep(0.0, 1), PARAMS, inputs, outputs, CopyFormat.FP16)
    assert host.run(command).counters["nonfinite_gradients"] == PARAMS
    buffers[0].host[:] = 0
    for buffer in buffers[:4]:
        buffer.sync_to_device()
    assert host.run(command).counters["copy_overflows"] == PARAMS


def test_memory_may_be_the_callers():
    memory = SimulatedMemory(1 << 20)
    with HostDevice(HostDevice.open("update-tiny").identity.config, memory) as device:
        buffer = device.allocate(64)
        buffer.host[:] = 5
        buffer.sync_to_device()
        assert memory.storage[:65].tolist() == [5] * 64 + [0]


def test_flushed_subnormals_of_the_caller_do_not_reach_the_update():
    """Once every v of gradients of 1e-20 was lost: the device's threads inherited torch's mode."""
    stored = []
    for flushed in (False, True):
        torch.set_flush_denormal(flushed)
        try:
            with HostDevice.open("update-tiny") as device:
                command = in_place(device, params=4096)
                device.memory.view(*command.reads()["g"]).view("<u4")[:] = np.float32(1e-20).view(np.uint32)
                device.run(command)
                stored.append(device.memory.view(*command.writes()["v"]).tobytes())
        finally:
            torch.set_flush_denormal(False)
    assert any(stored[0]) and stored[0] == stored[1]


def test_no_memory_for_a_stream_ends_all_threads(host, monkeypatch):
    """Once the threads that wait for the gradient waited for ever."""

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(update, "expand", fail)
    command = replace(in_place(host), gradient=GradientFormat.TOPK, gradient_bytes=64)
    with pytest.raises(MemoryError):
        host.run(command)


SOME = 5000


@pytest.mark.parametrize("scale", [1.0, 0.3712, -2.0])
def test_bf16_gradients_give_the_bits_of_fp32_ones_that_were_multiplied(scale):
    """As the model has it, too; subnormal products included."""
    rng = np.random.default_rng(6)
    patterns = rng.integers(0, 1 << 16, SOME, dtype=np.uint16)
    patterns[(patterns & 0x7F80) == 0x7F80] = 0x0001  # finite
    with np.errstate(over="ignore"):
        multiplied = bf16_values(patterns) * np.float32(scale)
    results = []
    for name, gradient in (("host", patterns), ("host", multiplied), ("model", patterns)):
        with open_device(f"{name}:update-smartssd") as device:
            command = in_place(device, SOME)
            narrow = gradient.dtype == np.uint16
            memory = device.memory.view(command.inputs["g"], gradient.nbytes)
            memory[:] = gradient.view(np.uint8)
            if narrow:
                command = replace(command, gradient=GradientFormat.BF16, gradient_scale=scale)
            device.run(command)
            arrays = command.writes().values()
            results.append([device.memory.view(*span).copy() for span in arrays])
    for mine, theirs, model in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(mine, model)


def test_boards_refuse_bf16_gradients_and_others_a_factor(host):
    command = in_place(host)
    with pytest.raises(CommandError, match="gradient must be fp32 or topk on update-tiny, not bf16"):
        replace(command, gradient=GradientFormat.BF16).check(host.identity.config)
    with pytest.raises(CommandError, match="gradient_scale must be 1 but for bf16 gradients, not 2"):
        replace(command, gradient_scale=2.0).check(host.build)


def random_inputs(command, memory, scale):
    """Weights, and gradients of which many are zero; moments are zero."""
    rng = np.random.default_rng(command.params)
    view = memory.view(*command.reads()["p"]).view("<f4")
    view[:] = rng.standard_normal(view.size) * scale
    view[::97] = [0.0, -0.0, np.inf, np.nan][command.params % 4]
    gradients = memory.view(*command.reads()["g"]).view("<f4")
    gradients[:] = rng.standard_normal(view.size) * (rng.random(view.size) < 0.3)


@pytest.mark.parametrize("copy", [CopyFormat.FP16, CopyFormat.BF16])
@pytest.mark.parametrize("lr", [1e-5, 1e-2])
@pytest.mark.parametrize("params", [1, 4096, 4099, 20_001])
def test_a_delta_is_what_changes_in_the_copy(monkeypatch, copy, lr, params):
    """By blocks on several threads, in place; equal to the model's bytes, and from the old copy to the new one."""
    monkeypatch.setattr(VectorLane, "BLOCK_PARAMS", 8192)
    results = []
    for name, delta in (("host", True), ("model", True), ("host", False)):
        with open_device(f"{name}:update-smartssd") as device:
            command = in_place(device, params)
            command = replace(command, rule=AdamStep(lr, 1), copy=copy, delta=delta, first_param=1024)
            target = device.allocate(4 * params + 64).address
            command = replace(command, outputs=command.outputs | {"copy": target})
            random_inputs(command, device.memory, 0.02)
            old = round_words(device.memory.view(*command.reads()["p"]).view("<f4"), copy)
            counters = device.run(command).counters
            results.append((device.memory.view(*command.writes()["copy"]).copy(), counters))
    (mine, counted), (model, model_counted), (new, _) = results
    size = DeltaHeader.size_in(mine[:32].tobytes())
    np.testing.assert_array_equal(mine[:size], model[:size])
    assert counted == model_counted
    changes = changes_of(mine[:size])
    new = new.view("<u2")
    assert set(np.flatnonzero(old != new)) <= set(changes.indices.tolist())
    if lr == 1e-5 and params > 1:
        assert size < new.nbytes and changes.indices.size == np.count_nonzero(old != new)
    # In three pieces, and without a word between two of them.
    cuts = [0, params // 3, min(params, params // 3 + 1), max(params // 3 + 1, 2 * params // 3), params]
    spans = [(cuts[0], cuts[1]), (cuts[2], cuts[3]), (cuts[3], cuts[4])]
    gap = old[params // 3]
    apply_delta(mine[:size], [(a, old[a:].ctypes.data, b - a) for a, b in spans if a < b])
    new[params // 3] = gap
    np.testing.assert_array_equal(old, new)


def test_a_delta_for_other_words_is_refused():
    with HostDevice.open("update-tiny") as host:
        command = replace(in_place(host, 64), copy=CopyFormat.BF16, delta=True)
        command = replace(command, outputs=command.outputs | {"copy": host.allocate(256).address})
        host.run(command)
        delta = host.memory.view(*command.writes()["copy"])
        delta = delta[: DeltaHeader.size_in(delta[:32].tobytes())]
        words = np.zeros(65, np.uint16)
        with pytest.raises(StreamError, match="not with 64 parameters in BF16"):
            apply_delta(delta, [(0, words.ctypes.data, 65)])
        damaged = np.append(delta[:-1], delta[-1] ^ 1)
        with pytest.raises(StreamError, match="a delta must be as its header and checksums state"):
            apply_delta(damaged, [(0, words.ctypes.data, 64)])


SPLIT_RULES = [
    *(AdamStep(1e-3, 3, weight_decay=0.1, profile=profile, state_format=form)
      for profile in Profile for form in StateFormat),
    SgdStep(0.25, 3), SgdStep(0.1, 3, momentum=0.9), AdagradStep(0.1, 3), LionStep(1e-3, 3, state_format="mx8"),
]  # fmt: skip


def split_command(device, rule, params, delta=False):
    """Numbers of all sizes, the largest and NaN too; state of zeros."""
    rng = np.random.default_rng(params)
    p = (rng.standard_normal(params) * 10.0 ** rng.uniform(-40, 38, params)).astype(np.float32)
    p[:6] = np.uint32([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7FC00001, 0x3F808000, 0x3F818000]).view(np.float32)
    g = rng.standard_normal(params).astype(np.float32)
    weight, rest = split_master(p.view(np.uint32))
    addresses = {}
    for name, array in {"g": g, "weight": weight, "rest": rest}.items():
        addresses[name] = device.allocate(array.nbytes).address
        device.memory.view(addresses[name], array.nbytes)[:] = array.view("u1")
    state = {name: device.allocate(rule.state_format.array_bytes(name, params)).address for name in rule.arrays}
    out = {name: addresses[name] for name in ("weight", "rest")} | state
    if delta:  # into other ranges, too
        sizes = {name: rule.state_format.array_bytes(name, params) for name in out}
        out = {name: device.allocate(size_bytes).address for name, size_bytes in sizes.items()}
    copy = {"copy": device.allocate(8 * params + 4096).address} if delta else {}
    copies = {"copy": CopyFormat.BF16, "delta": True} if delta else {}
    return UpdateCommand(rule, params, addresses | state, out | copy, master=MasterFormat.SPLIT, **copies), p, g


@pytest.mark.parametrize("rule", SPLIT_RULES, ids=str)
def test_a_split_master_has_the_bits_of_one_in_fp32(rule):
    """On both devices in software: every array that they write, and what they count; p joined is p in one piece."""
    params = 8192 if rule.state_format is StateFormat.MX8 else 8187
    written, counts = [], []
    for name in ("host", "model"):
        with open_device(f"{name}:update-tiny") as device:
            command, p, g = split_command(device, rule, params)
            counts.append(device.run(command).counters)
            written.append({key: device.memory.view(*span).copy() for key, span in command.writes().items()})
    for array, values in written[0].items():
        np.testing.assert_array_equal(values, written[1][array], array)
    assert counts[0] == counts[1] and counts[0]["copy_overflows"] > 0
    expected = {"g": g, "p": p} | {key: np.zeros_like(written[0][key]) for key in rule.arrays}
    expected = {key: array.view("<f4") if rule.state_format is StateFormat.FP32 else array.view(f"<u{size}")
                for key, array in expected.items()
                for size in [4 if key in "gp" else 1 if rule.state_format is StateFormat.MX8 else 2]
                } | {"g": g, "p": p}  # fmt: skip
    VectorLane(rule, CopyFormat.NONE).step(expected, {key: x for key, x in expected.items() if key != "g"})
    joined = join_master(*(written[0][half].view("<u2") for half in ("weight", "rest")))
    np.testing.assert_array_equal(joined, expected["p"].view(np.uint32))


def test_the_delta_of_a_split_master_is_of_its_weights():
    deltas = []
    for name in ("host", "model"):
        with open_device(f"{name}:update-tiny") as device:
            command, p, _ = split_command(device, SgdStep(1e-6, 1), 20_000, delta=True)
            device.run(command)
            memory = device.memory.view(*command.writes()["copy"])
            deltas.append(memory[: DeltaHeader.size_in(memory[:32].tobytes())].copy())
            weights = split_master(p.view(np.uint32))[0]
            assert (weights.view("u1") != device.memory.view(*command.writes()["weight"])).any()
            apply_delta(deltas[-1], [(0, weights.ctypes.data, weights.size)])
            np.testing.assert_array_equal(weights.view("u1"), device.memory.view(*command.writes()["weight"]))
    np.testing.assert_array_equal(*deltas)


def test_a_split_master_is_refused_where_it_means_nothing(host):
    command, _, _ = split_command(host, SgdStep(0.1, 1), 64)
    with pytest.raises(CommandError, match="master must be fp32 on update-tiny, not split"):
        command.check(host.identity.config)
    with pytest.raises(CommandError, match="copy of a split master must be NONE, as its weight is one, not FP16"):
        host.run(replace(command, copy=CopyFormat.FP16))
    with pytest.raises(CommandError, match="inputs must be addresses of g, p, not of g, rest, weight"):
        host.run(replace(command, master=MasterFormat.FP32))
