"""Functions that stop where they call, and go on when they are resumed."""

import contextvars
import threading
from functools import partial

import pytest
import torch

from nearflash.offload.schedule.fiber import COMPUTED, Call, Fiber

VARIABLE = contextvars.ContextVar("variable", default="outside")


def call(subject, function=lambda value: value, *args, **kwargs):
    return Fiber.wait_for(Call(subject, function, args, kwargs))


def test_it_stops_at_each_call_and_returns_at_its_end():
    seen = []

    def run():
        for number in range(3):
            seen.append(call(number))
        return "end"

    fiber = Fiber(run, "test")
    assert not seen
    first = fiber.resume()
    assert first.subject == 0 and not seen
    assert fiber.resume("a").subject == 1 and seen == ["a"]
    assert fiber.resume("b").subject == 2
    assert not fiber.ended
    assert fiber.resume("c") is None
    assert fiber.ended and fiber.result == "end" and seen == ["a", "b", "c"]
    fiber.close()


def test_a_fiber_that_is_given_its_own_call_computes_it_and_stops_in_its_middle():
    seen = []

    def double():
        seen.append(threading.current_thread().name)
        return 2 * call("inner")

    fiber = Fiber(lambda: call("outer", double), "test")
    assert fiber.resume(outer := fiber.resume()).subject == "inner" and outer.subject == "outer"
    computed = fiber.resume(4)
    assert computed.subject is COMPUTED and computed.compute() == 8 and seen == ["test"]
    assert fiber.resume("another") is None and fiber.result == "another"


def test_one_runs_at_a_time():
    running, most = [], []

    def run():
        for _ in range(20):
            running.append(1)
            most.append(len(running))
            running.pop()
            call(None)

    fibers = [Fiber(run, f"test {number}") for number in range(4)]
    calls = [fiber.resume() for fiber in fibers]
    while any(calls):
        calls = [fiber.resume() if waiting else None for fiber, waiting in zip(fibers, calls, strict=True)]
    assert len(most) == 80 and max(most) == 1


def test_what_it_raises_reaches_whoever_resumes_it():
    def run():
        call(None)
        raise ValueError("of the fiber")

    fiber = Fiber(run, "test")
    fiber.resume()
    with pytest.raises(ValueError, match="of the fiber"):
        fiber.resume()
    assert fiber.ended
    fiber.close()


def test_closing_unwinds_it():
    unwound = []

    def run():
        try:
            call(None)
        finally:
            unwound.append(threading.current_thread().name)

    fiber = Fiber(run, "unwound")
    fiber.resume()
    fiber.close()
    fiber.close()
    assert unwound == ["unwound"] and fiber.ended
    assert "unwound" not in {thread.name for thread in threading.enumerate()}
    Fiber(run, "never begun").close()


def test_a_call_outside_of_a_fiber_is_computed_at_once():
    assert call(None, lambda a, b: a - b, 7, b=3) == 4


def test_a_call_is_computed_with_the_fibers_variables():
    def run():
        VARIABLE.set("inside")
        call(None, VARIABLE.get)

    fiber = Fiber(run, "test")
    waiting = fiber.resume()
    assert VARIABLE.get() == "outside"
    assert waiting.compute() == "inside"
    fiber.close()


def test_the_hidden_states_of_a_call():
    waiting = partial(Call, None, None)
    states, other = torch.randn(2, 3), torch.randn(3, 2)
    assert waiting((states, other), {}).hidden_states is states
    assert waiting((), {"hidden_states": states, "mask": other}).hidden_states is states
    assert waiting((), {"mask": other}).hidden_states is None
    assert waiting(("text",), {}).hidden_states is None
    assert waiting((other.T,), {}).hidden_states is None, "its memory is in another order"
    other_states = waiting((states, other), {})
    other_states.replace_states(other)
    assert other_states.args[0] is other
    by_name = waiting((), {"hidden_states": states})
    by_name.replace_states(other)
    assert by_name.hidden_states is other
