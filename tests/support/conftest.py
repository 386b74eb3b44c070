"""What may hang runs here beside the test, which reports it in time."""

import sys
import threading
import traceback

import pytest


@pytest.fixture
def run_within():
    return _run_within


def _run_within(seconds, name, call, give_up=lambda: None):
    """What the call gives or raises, in a thread of its own.

    Raises TimeoutError, with the name and where all threads stand, after `give_up`, which should end what waits.
    """
    outcome = []

    def run():
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        frames, names = sys._current_frames(), {each.ident: each.name for each in threading.enumerate()}
        stacks = (f"{names.get(i)}:\n{''.join(traceback.format_stack(frame)[-4:])}" for i, frame in frames.items())
        give_up()
        raise TimeoutError(f"{name} must end within {seconds} s; threads stand at:\n" + "\n".join(stacks))
    value, error = outcome[0]
    if error is not None:
        raise error
    return value
