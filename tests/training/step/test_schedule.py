"""The schedule: what overlaps, what is remembered, what a failure leaves behind. Results are those of the model."""

import json
import signal
import threading
import time

import pytest
import torch

from nearflash.abi.errors import AddressError, DeviceError, StateError, StorageFullError
from nearflash.device import open_device
from nearflash.training.step import schedule
from nearflash.training.step.transfer import IN_FLIGHT

EXTENTS = 12
PARAMS = EXTENTS * 1024


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    """Fewer than extents."""
    monkeypatch.setattr(schedule, "SLOTS", 6)


@pytest.fixture
def tensor():
    generator = torch.Generator().manual_seed(8)
    return torch.nn.Parameter(torch.randn(PARAMS, generator=generator))


def set_gradient(tensor, step):
    tensor.grad = torch.randn(PARAMS, generator=torch.Generator().manual_seed(300 + step))


def bits(optimizer):
    return [torch.from_numpy(optimizer.store.read_array(array)) for array in "pmv"]


def assert_equal(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def undisturbed(open_optimizer, path, steps):
    """State after so many steps without trouble."""
    fresh = torch.nn.Parameter(torch.randn(PARAMS, generator=torch.Generator().manual_seed(8)))
    optimizer = open_optimizer([fresh], path=path)
    for step in range(steps):
        set_gradient(fresh, step)
        optimizer.step()
    return bits(optimizer)


def delay(monkeypatch, place, name, seconds):
    real = getattr(place, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, slow)


# Faults


def fail_at(monkeypatch, place, name, when, error):
    """Raise at the call number `when` (from 0); returns what puts it right."""
    real, calls, lock = getattr(place, name), [0], threading.Lock()

    def failing(*args, **kwargs):
        with lock:
            calls[0] += 1
            number = calls[0] - 1
        if number >= when:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, failing)
    return lambda: monkeypatch.setattr(place, name, real)


@pytest.mark.parametrize("resident_bytes", [0, 3 * 12 * 1024])
@pytest.mark.parametrize("when", [0, 3, EXTENTS - 1])
@pytest.mark.parametrize("stage", ["read", "update", "write", "commit"])
def test_a_failure_leaves_the_step_before(open_optimizer, tmp_path, monkeypatch, tensor, stage, when, resident_bytes):
    optimizer = open_optimizer([tensor], device="model:update-tiny", resident_bytes=resident_bytes)
    threads = threading.active_count()
    for step in range(2):
        set_gradient(tensor, step)
        optimizer.step()
    set_gradient(tensor, 2)
    before, stored = tensor.detach().clone(), bits(optimizer)
    store, device = optimizer._optimizer_state.store, optimizer._optimizer_state._schedule.transfers[0].device
    resets = []
    monkeypatch.setattr(device, "reset", lambda: resets.append(1))
    errors = {
        "read": (store, "read", StateError("damaged")),
        "update": (device, "wait", DeviceError("status WRITE_ERROR")),
        "write": (store, "write", StorageFullError("no room")),
        "commit": (store, "commit", StateError("a flush failed")),
    }
    place, name, error = errors[stage]
    repair = fail_at(monkeypatch, place, name, 0 if stage == "commit" or resident_bytes else when, error)
    with pytest.raises(type(error), match=str(error)):
        optimizer.step()
    repair()
    assert threading.active_count() == threads
    # Where nothing can be read, parameters that were written cannot be read back: the next step does that first.
    assert optimizer.steps == 2 and (torch.equal(before, tensor) or (stage == "read" and resident_bytes))
    assert_equal(stored, bits(optimizer))
    assert len(resets) == (stage != "commit")
    optimizer.step()
    assert_equal(bits(optimizer), undisturbed(open_optimizer, tmp_path / "other", 3))


def test_the_first_error_is_raised(open_optimizer, monkeypatch, tensor):
    optimizer = open_optimizer([tensor])
    store = optimizer._optimizer_state.store
    set_gradient(tensor, 0)
    fail_at(monkeypatch, store, "read", 15, StateError("first"))
    delay(monkeypatch, store, "write", 0.02)
    fail_at(monkeypatch, store, "write", 2, StorageFullError("second"))
    with pytest.raises(StateError, match="first"):
        optimizer.step()


def test_an_interrupt_discards_the_step(open_optimizer, monkeypatch, tensor):
    optimizer = open_optimizer([tensor], device="model:update-tiny")
    threads = threading.active_count()
    set_gradient(tensor, 0)
    before = tensor.detach().clone()
    fail_at(monkeypatch, optimizer._optimizer_state.store, "commit", 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.steps == 0 and torch.equal(before, tensor) and threading.active_count() == threads


@pytest.mark.parametrize("place, name", [("store", "commit"), ("flat", "publish")])
def test_an_interrupt_after_the_commit_waits_for_the_tensors(open_optimizer, monkeypatch, tensor, place, name):
    """The store was at the next step, the tensors partly: the next step went on from the mix."""
    optimizer = open_optimizer([tensor], loss_scale="dynamic")
    set_gradient(tensor, 0)
    owner = getattr(optimizer._optimizer_state, place)
    real, main = getattr(owner, name), threading.main_thread().ident

    def interrupted(*args, **options):
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        real(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert optimizer.steps == 1 and optimizer._optimizer_state.agrees() and optimizer.loss_scale > 0
    assert optimizer.state_dict()["state"][0]["nearflash_step"] == 1
    assert optimizer.metadata == {} and optimizer._runner.loss_scale.good_steps == 1


def test_a_failed_publication_is_made_up_for(open_optimizer, tmp_path, monkeypatch, tensor):
    """The next step takes the tensors from the store first."""
    optimizer = open_optimizer([tensor])
    set_gradient(tensor, 0)
    repair = fail_at(monkeypatch, optimizer._optimizer_state.flat, "publish", 0, MemoryError())
    before = tensor.detach().clone()
    with pytest.raises(MemoryError):
        optimizer.step()
    repair()
    assert optimizer.steps == 1 and not torch.equal(before, tensor)
    set_gradient(tensor, 1)
    optimizer.step()
    assert_equal(bits(optimizer), undisturbed(open_optimizer, tmp_path / "other", 2))
    assert optimizer._optimizer_state.agrees()


def test_a_step_that_an_interrupt_left_in_flight_is_discarded(open_optimizer, tmp_path, tensor):
    """Its threads would fill the slots of the next one."""
    optimizer = open_optimizer([tensor])
    lost = optimizer._optimizer_state.begin_step()
    lost.offer(optimizer._optimizer_state.extent_order([0]))
    set_gradient(tensor, 0)
    optimizer.step()
    assert lost.ended
    assert_equal(bits(optimizer), undisturbed(open_optimizer, tmp_path / "other", 1))


def test_no_thread_to_be_had(open_optimizer, monkeypatch, tensor):
    optimizer = open_optimizer([tensor])
    set_gradient(tensor, 0)
    threads = threading.active_count()
    starts = iter(range(100))
    real = threading.Thread.start

    def start(thread):
        if next(starts) >= 2:
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(StateError, match="must have threads of its own"):
            optimizer.step()
    assert optimizer.steps == 0 and threading.active_count() == threads
    optimizer.step()
    assert optimizer.steps == 1


def test_device_memory_that_is_too_small(open_optimizer, tmp_path, tensor):
    """Named at construction; nothing of the device stays taken."""
    with open_device("model:update-tiny") as device:
        device._memory._ranges._free = [(4096, 10 * 4096)]
        with pytest.raises(AddressError, match="must fit the largest free range"):
            open_optimizer([tensor], device=device)
        assert device._memory._ranges._free == [(4096, 10 * 4096)]


# Overlap

STAGES = ("read", "update", "write")


def test_stages_overlap_and_the_trace_shows_it(open_optimizer, tmp_path, monkeypatch, tensor):
    optimizer = open_optimizer([tensor])
    store, device = optimizer._optimizer_state.store, optimizer._optimizer_state._schedule.transfers[0].device
    for place, name in ((store, "read"), (store, "write")):
        delay(monkeypatch, place, name, 0.01)
    delay(monkeypatch, device, "wait", 0.03)
    set_gradient(tensor, 0)
    optimizer.step()
    optimizer.report.timeline.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {name.rstrip(" 0123456789") for name in names} == {
        "optimizer",
        *(f"device 0: {row}" for row in (*STAGES, "commands")),
    }
    spans = {kind: [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == kind] for kind in
             ("flash read", "update", "flash write")}  # fmt: skip
    assert {kind: len(found) for kind, found in spans.items()} == dict.fromkeys(spans, EXTENTS)
    for one, other in (("flash read", "update"), ("update", "flash write")):
        assert any(a < d and c < b for a, b in spans[one] for c, d in spans[other]), f"{one} beside {other}"


def test_the_next_command_is_submitted_before_the_one_before_is_waited_for(open_optimizer, monkeypatch, tensor):
    """The host gathers and stages beside the device's work; the bits are those of the other tests."""
    optimizer = open_optimizer([tensor])
    device = optimizer._optimizer_state._schedule.transfers[0].device
    submit, wait, counts = device.submit, device.wait, {"most": 0, "in flight": 0, "submitted": 0}

    def submitting(command):
        counts["in flight"] += 1
        counts["submitted"] += 1
        counts["most"] = max(counts["most"], counts["in flight"])
        return submit(command)

    def waiting(ticket, *rest):
        time.sleep(0.01)  # reading goes on
        counts["in flight"] -= 1
        return wait(ticket, *rest)

    monkeypatch.setattr(device, "submit", submitting)
    monkeypatch.setattr(device, "wait", waiting)
    set_gradient(tensor, 0)
    optimizer.step()
    assert counts == {"most": IN_FLIGHT, "in flight": 0, "submitted": EXTENTS}


@pytest.mark.parametrize("slow, reason", [("read", "read"), ("wait", "update"), ("write", "write")])
def test_stalls_name_the_slow_stage(open_optimizer, monkeypatch, tensor, slow, reason):
    optimizer = open_optimizer([tensor])
    store, device = optimizer._optimizer_state.store, optimizer._optimizer_state._schedule.transfers[0].device
    set_gradient(tensor, 0)
    optimizer.step()  # compiles
    delay(monkeypatch, device if slow == "wait" else store, slow, 0.1)
    set_gradient(tensor, 1)
    optimizer.step()
    stalls = optimizer.report.stalls
    fractions = stalls.fractions
    assert set(fractions) == {"gradients", "read", "update", "write"}
    assert all(0 <= fraction <= 1 for fraction in fractions.values())
    assert fractions[reason] > 0.2
    assert fractions[reason] == stalls.seconds[reason] / stalls.step_s


# What is remembered


def test_extents_turn_round_and_stay(open_optimizer, tmp_path, monkeypatch, tensor):
    """The last extents of a step are the first of the next; those that fit are not read again, and all are written."""
    slots = 2
    optimizer = open_optimizer([tensor], resident_bytes=slots * 12 * 1024)
    store, reads, lock = optimizer._optimizer_state.store, [], threading.Lock()
    real = store.read

    def noted(array, extent, memory):
        with lock:
            reads.extend([extent.index] if array == "p" else [])
        real(array, extent, memory)

    monkeypatch.setattr(store, "read", noted)
    for step in range(3):
        set_gradient(tensor, step)
        optimizer.step()
        if step == 0:
            assert sorted(reads) == list(range(EXTENTS))
        else:
            assert len(reads) <= EXTENTS - slots and set(reads) <= set(range(EXTENTS))
            kept = set(range(EXTENTS)) - set(reads)
            order = sorted(range(EXTENTS), reverse=step % 2 == 1)
            assert kept <= set(order[: len(kept) + schedule.WRITERS]), "those written last; writers may overtake"
        reads.clear()
    assert optimizer.report.traffic.flash_written_bytes == 3 * 12 * PARAMS
    monkeypatch.setattr(store, "read", real)
    assert_equal(bits(optimizer), undisturbed(open_optimizer, tmp_path / "other", 3))


def test_orders_alternate(open_optimizer, tensor):
    optimizer = open_optimizer([tensor])
    orders = []
    for step in range(3):
        orders.append([extent.index for extent in optimizer._optimizer_state._schedule.order()])
        set_gradient(tensor, step)
        optimizer.step()
    assert orders[0] == orders[2] == orders[1][::-1] == list(range(EXTENTS))
