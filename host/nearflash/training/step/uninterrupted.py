"""Calls that an interrupt of the main thread does not cut in two."""

import contextlib
import threading
from collections.abc import Callable

import torch

__all__ = ["uninterrupted"]


def uninterrupted(call: Callable[[], None], name: str) -> None:
    """Make the call in another thread: Python raises KeyboardInterrupt, and what handlers raise, in the main one.

    An interrupt is raised here when the call has ended, or before it has begun. CUDA work goes to the streams that are
    current here. name: of the thread, in traces. Raises what the call raises; RuntimeError where there is no thread.
    """
    on_cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    streams = [torch.cuda.current_stream(device) for device in on_cuda]
    begin, ended = threading.Event(), threading.Event()
    wanted, errors = True, list[BaseException]()

    def run() -> None:
        begin.wait()
        try:
            if wanted:
                with contextlib.ExitStack() as stack:
                    for stream in streams:
                        stack.enter_context(torch.cuda.stream(stream))
                    call()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
        begin.set()
        ended.wait()
    finally:
        if not begin.is_set():
            wanted = False
            begin.set()
        while wanted and not ended.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                ended.wait()
    if errors:
        raise errors[0]
