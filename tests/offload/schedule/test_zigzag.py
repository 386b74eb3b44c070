"""The order of the schedule: a layer's weights once for all batches, loads before the visits they are for."""

import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from nearflash.abi.errors import UnsupportedError
from nearflash.offload.schedule.fiber import Call, Fiber
from nearflash.offload.schedule.pipeline import PipelineStage
from nearflash.offload.schedule.zigzag import Interception, ScheduledBatch, ZigZag, attend_beside
from nearflash.offload.tiers.activations import Parked
from nearflash.offload.tiers.ledger import CACHE_WAIT, STATES_WAIT, Ledger
from nearflash.offload.tiers.link import DeviceLink


class Cached(NamedTuple):
    """Stands for a layer's keys and values."""

    number: int
    batch: int
    attends_on_host: bool = False


class Recorder:
    """Stands for weights and the mover, and notes what they are asked."""

    def __init__(self, overlap=True):
        self.log, self.overlap = [], overlap

    @contextmanager
    def use(self, number, *, last):
        self.log.append(("use", number, last))
        yield
        self.log.append(("done", number))

    def begin(self, layer):
        self.log.append(("begin", *layer[:2]))

    def ready(self, layer):
        self.log.append(("ready", *layer[:2]))

    def finish(self, layer):
        self.log.append(("finish", *layer[:2]))

    def drain(self):
        self.log.append(("drain",))


class Stack(torch.nn.Module):
    """A model of layers, which are its parts, and a head."""

    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(count))
        self.head = torch.nn.Identity()

    def forward(self, states):
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def stay():
    """Hidden states stay where they are."""
    return Parked("gpu", DeviceLink())


def batch(model, number, passes, count, out=None):
    def run():
        for step in range(passes):
            value = model(torch.tensor([float(number), float(step)]))
            if out is not None:
                out.append((number, step, value.tolist()))

    layers = {layer: Cached(layer, number) for layer in range(count)}
    return ScheduledBatch(run, f"batch {number}", layers, stay(), passes)


def run(batches, passes, layers=3, more=False, **options):
    model, recorder, out = Stack(layers), Recorder(), []
    schedule = ZigZag(model.layers, recorder, recorder, Ledger(), PipelineStage(0, 1, layers), **options)
    with Interception([*model.layers, model.head]):
        made = [batch(model, n, p, layers, out) for n, p in zip(range(batches), passes, strict=True)]
        schedule.run(made, more=more)
    return recorder.log, out


def test_each_layer_once_for_all_batches():
    log, out = run(2, [2, 2])
    uses = [(entry[1], entry[2]) for entry in log if entry[0] == "use"]
    assert uses == [(0, False), (1, False), (2, False), (0, True), (1, True), (2, True)]
    visits = [entry[1:] for entry in log if entry[0] == "finish"]
    assert visits == [(layer, number) for _ in range(2) for layer in range(3) for number in range(2)]
    assert sorted(out) == [(n, step, [float(n), float(step)]) for n in range(2) for step in range(2)]


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_cache_is_begun_two_visits_before_its_own(batches):
    log, _ = run(batches, [1] * batches)
    visits = [(layer, number) for layer in range(3) for number in range(batches)]
    assert [entry[1:] for entry in log if entry[0] == "ready"] == visits
    for at, visit in enumerate(visits):
        ready = log.index(("ready", *visit))
        assert log.index(("begin", *visit)) < log.index(("ready", *visits[max(0, at - 2)]))
        assert ready < log.index(("finish", *visit))


def test_more_blocks_keep_the_loads_going():
    log, _ = run(1, [1], more=True)
    assert [entry[2] for entry in log if entry[0] == "use"] == [False] * 3


def test_batches_that_end_early_are_left_out():
    log, out = run(3, [3, 1, 2])
    visits = [entry[1:] for entry in log if entry[0] == "finish" and entry[1] == 0]
    assert visits == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 2), (0, 0)]
    assert len(out) == 6 and log[-1] == ("drain",)


def test_passes_are_reported():
    seen = []
    run(2, [4, 2], after_pass=lambda: seen.append(len(seen)))
    assert seen == [0, 1, 2, 3]


def test_an_error_ends_all_batches():
    model, recorder, unwound = Stack(3), Recorder(), []

    def wrong():
        model(torch.zeros(1))
        raise RuntimeError("in a batch's own code")

    def right():
        try:
            for _ in range(5):
                model(torch.zeros(1))
        finally:
            unwound.append(1)

    with Interception([*model.layers, model.head]):
        made = [ScheduledBatch(each, each.__name__, {}, stay(), 5) for each in (right, wrong)]
        with pytest.raises(RuntimeError, match="own code"):
            ZigZag(model.layers, recorder, recorder, Ledger(), PipelineStage(0, 1, 3)).run(made)
    assert unwound == [1] and all(each.fiber.ended for each in made)


def test_forwards_are_put_back():
    model = Stack(2)
    with Interception([*model.layers, model.head]):
        fiber = Fiber(lambda: model(torch.zeros(1)), "test")
        call = fiber.resume()
        assert isinstance(call, Call) and call.subject is model.layers[0]
        fiber.close()
    assert "forward" not in vars(model.layers[0])
    assert Fiber(lambda: model(torch.zeros(1)), "test").resume() is None


@pytest.mark.parametrize("sequences", [4, 1])
def test_rows_of_last_tokens_are_made_contiguous(sequences):
    """Else torch multiplies them one by one, and copies the output layer's weights for each: of one sequence, too,
    where `is_contiguous` is true of any distance of rows.
    """
    seen = []

    class Head(torch.nn.Module):
        def forward(self, states):
            seen.append(states.stride())
            return states

    head = Head()
    with Interception([head]):
        head(torch.zeros(sequences, 7, 3)[:, -1:, :])
    assert seen == [(3, 3, 1)]


def test_rows_that_lie_together_stay_the_tensor_that_they_are():
    """A view of them was never parked: the batches' states stayed in memory."""
    seen = []

    class Layer(torch.nn.Module):
        def forward(self, states):
            seen.append(states)
            return states

    layer, states = Layer(), torch.zeros(1, 7, 3)
    with Interception([layer]):
        layer(states)
    assert seen[0] is states


def test_a_layer_that_returns_a_tuple():
    class Pair(torch.nn.Module):
        def forward(self, states):
            return states + 1, "weights"

    pair, out = Pair(), []
    recorder = Recorder()
    with Interception([pair]):
        one = ScheduledBatch(lambda: out.append(pair(torch.zeros(1))), "one", {}, stay(), 1)
        ZigZag([pair], recorder, recorder, Ledger(), PipelineStage(0, 1, 1)).run([one])
    assert out[0][1] == "weights" and one.other_outputs == ("weights",)


def test_the_ledger_counts_what_storing_waits_for():
    """Before: a write that a visit waited for was in no span."""

    class SlowStates(Parked):
        def park(self, states):
            time.sleep(0.02)

    class SlowCache(Recorder):
        def finish(self, layer):
            time.sleep(0.02)

    model, recorder, ledger = Stack(3), SlowCache(), Ledger()
    one = batch(model, 0, 1, 3)
    one.parked = SlowStates("gpu", DeviceLink())
    with Interception([*model.layers, model.head]):
        ZigZag(model.layers, recorder, recorder, ledger, PipelineStage(0, 1, 3)).run([one])
    seconds = ledger.timeline.seconds
    assert seconds[CACHE_WAIT] >= 3 * 0.02 and seconds[STATES_WAIT] >= 2 * 0.02  # after each of three layers; between


class Attending(torch.nn.Module):
    """A layer whose attention the host computes."""

    def __init__(self, log, attend=lambda: None):
        super().__init__()
        self.log, self.attend = log, attend

    def forward(self, states):
        batch = int(states)
        self.log.append(("queries", batch))
        attend_beside(self.attend)
        self.log.append(("outputs", batch))
        return states


def attended(layers, recorder, batches):
    with Interception(layers):
        made = [
            ScheduledBatch(lambda at=at: [layer(torch.tensor([float(at)])) for layer in layers], f"batch {at}",
                           {number: Cached(number, at, True) for number in range(len(layers))}, stay(), 1)
            for at in range(batches)
        ]  # fmt: skip
        ZigZag(layers, recorder, recorder, Ledger(), PipelineStage(0, 1, len(layers))).run(made)
    return [entry for entry in recorder.log if entry[0] in ("queries", "outputs", "finish")]


def test_the_host_attends_for_a_batch_while_the_next_one_computes():
    recorder, seen = Recorder(), set()
    layers = [Attending(recorder.log, lambda: seen.add(threading.current_thread().name)) for _ in range(2)]
    one = [("queries", 0), ("queries", 1), ("outputs", 0), ("finish", 0, 0), ("queries", 2), ("outputs", 1),
           ("finish", 0, 1), ("outputs", 2), ("finish", 0, 2)]  # fmt: skip
    other = [(name, 1, rest[1]) if name == "finish" else (name, *rest) for name, *rest in one]
    assert attended(layers, recorder, 3) == one + other
    assert len(seen) == 1 and "nearflash-host-attention" in seen.pop()
    assert not [thread for thread in threading.enumerate() if "host-attention" in thread.name]


def test_without_overlap_it_waits_for_the_host():
    recorder = Recorder(overlap=False)
    order = [("queries", 0), ("outputs", 0), ("finish", 0, 0), ("queries", 1), ("outputs", 1), ("finish", 0, 1)]
    assert attended([Attending(recorder.log)], recorder, 2) == order


def test_an_error_of_the_hosts_attention_ends_the_run():
    def wrong():
        raise RuntimeError("on the host")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="on the host"):
        attended([Attending(recorder.log, wrong)], recorder, 3)
    assert ("outputs", 0) not in recorder.log


def test_a_layer_that_does_not_ask_the_host_is_an_error():
    with pytest.raises(UnsupportedError, match="layer 0 must attend by transformers' AttentionInterface"):
        attended([torch.nn.Identity()], Recorder(), 2)
