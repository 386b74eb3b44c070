"""The same commands on every device: the same bits, the same traffic, the same errors."""

from dataclasses import replace

import numpy as np
import pytest

from nearflash.abi.errors import AddressError, AlignmentError, CommandError
from nearflash.abi.kernel.commands import CopyFormat, UpdateCommand
from nearflash.abi.optimizers import AdagradStep, AdamStep, LionStep, Profile, SgdStep
from nearflash.device import open_device
from nearflash.device.selftest.update import UpdateVector, random_state, run_update

TAILS = [1, 2, 15, 16, 17, 1000]
FUNCTIONAL = ("params_done", "nonfinite_gradients", "copy_overflows", "read_beats", "write_beats")
SLOT = 8192


def slots_command(a, rule, params, copy=CopyFormat.NONE) -> UpdateCommand:
    """A command over eight neighbouring slots from address `a`: g, p, m, v, and the new p, m, v and copy."""
    inputs = {name: a + i * SLOT for i, name in enumerate(("g", "p", "m", "v"))}
    outputs = {name: a + i * SLOT for i, name in enumerate(("p", "m", "v", "copy"), 4)}
    return UpdateCommand(rule, params, inputs, outputs, copy)


@pytest.fixture(scope="module")
def reference():
    with open_device("model:update-tiny") as model:
        yield model


def same_as_reference(device, reference, case, state) -> None:
    (results, counters), (expected, expected_counters) = (
        run_update(device, case, state),
        run_update(reference, case, state),
    )
    for name, data in expected.items():
        dtype = f"<u{max(1, 4 * len(data) // len(expected['p']))}"
        np.testing.assert_array_equal(np.frombuffer(results[name], dtype), np.frombuffer(data, dtype), name)
    if device.identity.config == reference.identity.config:
        assert {name: counters[name] for name in FUNCTIONAL} == {name: expected_counters[name] for name in FUNCTIONAL}


@pytest.mark.parametrize("copy", CopyFormat)
@pytest.mark.parametrize("profile", Profile)
def test_every_profile_and_copy(device, reference, profile, copy):
    adam = AdamStep(3e-3, 4, weight_decay=0.1, profile=profile)
    same_as_reference(device, reference, UpdateVector(adam, 200, copy), random_state(np.random.default_rng(1), 200))


@pytest.mark.parametrize("profile", Profile)
@pytest.mark.parametrize("variant", ["no decay", "l2", "betas"])
def test_every_kind_of_decay(device, reference, variant, profile):
    variants = {
        "no decay": AdamStep(1e-2, 1, profile=profile),
        "l2": AdamStep(1e-2, 1000, weight_decay=0.5, decoupled=False, profile=profile),
        "betas": AdamStep(1e-4, 77, beta1=0.75, beta2=0.5, eps=0.0, weight_decay=1e-3, profile=profile),
    }
    same_as_reference(
        device, reference, UpdateVector(variants[variant], 100), random_state(np.random.default_rng(2), 100)
    )


OTHERS = [SgdStep(0.1, 3), SgdStep(0.1, 1, momentum=0.9, weight_decay=0.1),
          SgdStep(0.1, 3, momentum=0.9, nesterov=True, weight_decay=0.1, profile=Profile.TORCH_FUSED),
          AdagradStep(0.1, 3, lr_decay=0.1, weight_decay=0.1), AdagradStep(0.1, 3, profile=Profile.TORCH_FUSED),
          LionStep(1e-3, 3, weight_decay=0.1)]  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rule", OTHERS, ids=str)
def test_every_other_rule(device, reference, rule, in_place):
    """Arrays that a rule does not have are neither read nor written: the traffic counters are compared too."""
    case = UpdateVector(rule, 333, CopyFormat.BF16, in_place)
    same_as_reference(device, reference, case, random_state(np.random.default_rng(3), 333))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("rule", [AdamStep(1e-3, 3, weight_decay=0.1), *OTHERS], ids=str)
@pytest.mark.parametrize("form", ["bf16", "mx8"])
def test_narrow_state(device, reference, form, rule, in_place):
    """Across the end of a tile of the dither; blocks of zeros, of non-finite gradients, and of wide exponents."""
    params = 333 if form == "bf16" else 352
    if form not in device.build.state_formats:
        pytest.skip(f"{device.identity.name} has no state format {form}")
    state = random_state(np.random.default_rng(4), params)
    state[:, 64:96] = 0
    state[0, 96:128] = np.nan
    case = UpdateVector(replace(rule, state_format=form), params, CopyFormat.BF16, in_place, first_param=2 * 8192 - 96)
    same_as_reference(device, reference, case, state)


def test_narrow_state_of_first_steps_and_last_parameters(device, reference):
    """Where the dither's key has its largest arguments."""
    if "mx8" not in device.build.state_formats:
        pytest.skip(f"{device.identity.name} has no state format mx8")
    for step, first_param in ((1, 0), (1_000_000, (1 << 40) - 64), ((1 << 31) - 1, 1 << 39)):
        case = UpdateVector(AdamStep(1e-3, step, state_format="mx8"), 64, first_param=first_param)
        same_as_reference(device, reference, case, random_state(np.random.default_rng(step), 64))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("params", TAILS)
def test_tails_in_place_and_in_two_slots(device, reference, params, in_place):
    case = UpdateVector(AdamStep(1e-3, 3, weight_decay=0.01), params, CopyFormat.FP16, in_place)
    same_as_reference(device, reference, case, random_state(np.random.default_rng(params), params))


def test_a_sequence_of_steps_stays_equal(device, reference):
    """Two slots, alternating, the moments carried in device memory: what an optimizer does."""
    params, rng = 130, np.random.default_rng(8)
    gradients = rng.standard_normal((4, params), dtype=np.float32)
    runs = []
    for each in (device, reference):
        g, first, second = each.allocate(SLOT), each.allocate(3 * SLOT), each.allocate(3 * SLOT)
        first.host[:] = 0
        first.sync_to_device()
        for step, gradient in enumerate(gradients, 1):
            g.host[: gradient.nbytes] = gradient.view(np.uint8)
            g.sync_to_device(0, gradient.nbytes)
            old, new = (a.address for a in ((first, second) if step % 2 else (second, first)))
            inputs, outputs = (dict(p=at, m=at + SLOT, v=at + 2 * SLOT) for at in (old, new))
            adam = AdamStep(0.1, step, weight_decay=0.01)
            each.run(UpdateCommand(adam, params, inputs | {"g": g.address}, outputs))
        first.sync_from_device()
        runs.append([first.host[i * SLOT : i * SLOT + 4 * params].tobytes() for i in range(3)])
        for buffer in (g, first, second):
            each.free(buffer)
    assert runs[0] == runs[1]


def test_bytes_past_the_end_stay(device):
    """A tail writes its own bytes only."""
    buffer = device.allocate(8 * SLOT)
    buffer.host[:] = 0xA5
    buffer.sync_to_device()
    a = buffer.address
    params = 17
    device.run(slots_command(a, AdamStep(1e-3, 1), params, CopyFormat.BF16))
    buffer.sync_from_device()
    slots = buffer.host.reshape(8, SLOT)
    for slot, size_bytes in ((4, 4 * params), (5, 4 * params), (6, 4 * params), (7, 2 * params)):
        assert (slots[slot, size_bytes:] == 0xA5).all() and (slots[slot, :size_bytes] != 0xA5).any()
    assert (slots[:4] == 0xA5).all()
    device.free(buffer)


def test_link_bytes_are_counted_and_a_forgotten_sync_shows(device):
    down, up = device.links.to_device, device.links.from_device
    buffer = device.allocate(4 * SLOT)
    a, params = buffer.address, 64
    state = {name: a + i * SLOT for i, name in enumerate(("p", "m", "v"), 1)}
    command = UpdateCommand(AdamStep(0.5, 1), params, state | {"g": a}, state)
    buffer.host[:] = np.ones(SLOT, np.float32).view(np.uint8)
    buffer.sync_to_device()
    buffer.host[: 4 * params] = 0  # this gradient never reaches the device
    device.run(command)
    parameters = buffer.host[SLOT : SLOT + 4 * params].view(np.float32)
    assert (parameters == 1).all(), "the host's copy must be stale until it is synced"
    buffer.sync_from_device(SLOT, 4 * params)
    assert (parameters < 1).all(), "the device must have used the gradient that was synced, not the host's later one"
    assert (device.links.to_device - down, device.links.from_device - up) == (4 * SLOT, 4 * params)
    device.free(buffer)


def test_bad_commands_leave_memory_as_it_was(device):
    buffer = device.allocate(8 * SLOT)
    buffer.host[:] = np.random.default_rng(3).integers(0, 256, 8 * SLOT, np.uint8)
    buffer.sync_to_device()
    before = buffer.host.copy()
    a = buffer.address
    good = slots_command(a, AdamStep(1e-3, 1), 100)
    inputs, outputs = good.inputs, good.outputs
    bad = {
        AddressError: (replace(good, outputs=outputs | {"v": a + 8 * SLOT}),
                       replace(good, inputs=inputs | {"g": 1 << 40}), replace(good, params=10_000),
                       replace(good, outputs=outputs | {"p": a + SLOT + 64})),
        AlignmentError: (replace(good, inputs=inputs | {"m": a + 2 * SLOT + 4}),),
        CommandError: (replace(good, params=0), replace(good, params=-1), replace(good, inputs=outputs)),
    }  # fmt: skip
    for error, commands in bad.items():
        for command in commands:
            with pytest.raises(error):
                device.submit(command)
    buffer.sync_from_device()
    np.testing.assert_array_equal(buffer.host, before)
    device.run(good)
    device.free(buffer)


def test_freed_memory_is_refused(device):
    buffer = device.allocate(8 * SLOT)
    a = buffer.address
    device.free(buffer)
    with pytest.raises(AddressError, match="g read range must lie in one allocated buffer"):
        device.submit(slots_command(a, AdamStep(1e-3, 1), 100))


def test_commands_queue_and_tickets_end_in_any_order(device):
    buffer = device.allocate(8 * SLOT)
    a = buffer.address
    command = slots_command(a, AdamStep(1e-3, 1), 50)
    tickets = [device.submit(replace(command, params=params)) for params in (10, 20, 30)]
    assert [device.wait(tickets[i]).counters["params_done"] for i in (2, 0, 1)] == [30, 10, 20]
    with pytest.raises(CommandError, match="ticket must be one"):
        device.wait(tickets[0])
    device.free(buffer)


def test_identity_names_the_device(device, spec):
    assert device.identity.name == spec
    assert device.identity.digest64 == device.identity.config.digest64
