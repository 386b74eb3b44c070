"""Functions that stop in the middle and go on later: each in a thread of its own, of which one runs at a time.

A model's forward pass is somebody else's code. Run in a fiber, it stops where it calls a layer, and whoever resumes it
decides when that layer is computed, and computes it: between two stops it moves no further than from layer to layer.
Resumed with its own call, a fiber computes that itself, so that it can stop in the middle of a layer too.
"""

import contextvars
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from torch import Tensor

__all__ = ["COMPUTED", "Call", "Fiber"]

COMPUTED = object()
"""Subject of the call where a fiber stops that has computed its own: its function returns the result."""


@dataclass(eq=False)
class Call:
    """A fiber's call of `function(*args, **kwargs)`, whose result whoever resumes the fiber computes."""

    subject: Any
    """What the call belongs to; compared by identity."""
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The fiber's variables, which its libraries may read."""

    @property
    def hidden_states(self) -> Tensor | None:
        """The first argument where it is a contiguous tensor: by transformers' custom, the hidden states."""
        first = self.args[0] if self.args else self.kwargs.get("hidden_states")
        return first if isinstance(first, Tensor) and first.is_contiguous() else None

    def replace_states(self, states: Tensor) -> None:
        """Call with other hidden states."""
        if self.args:
            self.args = (states, *self.args[1:])
        else:
            self.kwargs["hidden_states"] = states

    def compute(self) -> Any:
        """The result."""
        return self.context.run(self.function, *self.args, **self.kwargs)


class _Closed(BaseException):
    """Raised in a fiber that will not be resumed again."""


class Fiber:
    """`run()` in a thread that runs only between `resume` and the next `Fiber.wait_for` or its end."""

    _own = threading.local()

    def __init__(self, run: Callable[[], Any], name: str) -> None:
        self._run, self._name = run, name
        self._inbox: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._outbox: SimpleQueue[tuple[Call | None, BaseException | None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.ended = False
        self.result: Any = None
        """What `run` returned."""

    @classmethod
    def wait_for(cls, call: Call) -> Any:
        """The result of a call, computed by whoever resumes this thread's fiber; at once where the thread is none.

        Resumed with the call, the fiber computes it, and then stops at a call of COMPUTED.
        """
        fiber: Fiber | None = getattr(cls._own, "fiber", None)
        if fiber is None:
            return call.compute()
        value = fiber._stop(call)
        if value is call:
            result = call.compute()
            value = fiber._stop(Call(COMPUTED, lambda: result))
        return value

    def resume(self, value: Any = None) -> Call | None:
        """Start it, or go on with a call's result, or with the call itself; returns its next call, None at its end.

        Raises what `run` raises.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        else:
            self._inbox.put((value, None))
        call, error = self._outbox.get()
        if error is not None:
            raise error
        return call

    def close(self) -> None:
        """End it where it is; may be called twice."""
        if self._thread is not None and not self.ended:
            self._inbox.put((None, _Closed()))
            self._thread.join()

    def _stop(self, call: Call) -> Any:
        """Stop at a call, and return what the fiber is resumed with. Raises what it is closed with."""
        self._outbox.put((call, None))
        value, error = self._inbox.get()
        if error is not None:
            raise error
        return value

    def _main(self) -> None:
        self._own.fiber = self
        error: BaseException | None = None
        try:
            self.result = self._run()
        except _Closed:
            pass
        except BaseException as raised:
            error = raised
        self.ended = True
        self._outbox.put((None, error))
