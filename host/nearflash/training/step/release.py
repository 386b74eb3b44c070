"""Memory and devices given back while nothing is trained, as an RL run generates, and taken again for the next step."""

import contextlib

import torch

from nearflash.abi.errors import StateError
from nearflash.storage import StateStore
from nearflash.storage.io.reuse import free_reused
from nearflash.support.process import give_memory_back
from nearflash.training.step.optimizer_state import OptimizerState
from nearflash.training.step.settings import StepSettings
from nearflash.training.step.streamed import is_streamed, placeholder

__all__ = ["Release"]


class Release:
    """Whether `state`'s devices, buffers, scratch file and copies are given back, and the tensors that are, too."""

    def __init__(self, state: OptimizerState, settings: StepSettings) -> None:
        self._state, self._settings = state, settings
        self.released = False
        """Between `release` and `acquire`."""
        self._emptied: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        """With their strides."""

    def release(self, *, parameters: bool, unlock: bool) -> None:
        """See NearStorageOptimizer.release. Raises StateError, with nothing given back."""
        state, flat = self._state, self._state.flat
        if state.scratch is not None and any(map(state.scratch.holds, flat.tensors)):
            raise StateError("gradients that are not in memory must be used before a release: call step, or zero_grad")
        if parameters:
            flat.check_memory()
            if state.unpublished or (flat.find_changed() and not state.agrees()):
                raise StateError(
                    "parameters must be what the store has of them for their memory to be given back, but others "
                    "changed them: call accept_parameters(), or, before the first step, construct the optimizer then"
                )
            self._emptied = [(tensor, tensor.stride()) for tensor in flat.tensors if not is_streamed(tensor)]
        state.give_back()
        self._empty()
        if unlock:
            state.store.close()
        self.released = True
        free_reused()
        if parameters and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        give_memory_back()

    def acquire(self) -> None:
        """See NearStorageOptimizer.acquire. Where it raises, all stays released."""
        state = self._state
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._empty)
            on_error.callback(state.give_back)
            state.open_devices()
            if state.store.closed:
                state.store = on_error.enter_context(self._open_again(state.store))
            for tensor, stride in self._emptied:
                tensor.data = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
            state.begin_use()
            if self._emptied:
                state.load_parameters()
            on_error.pop_all()
        self._emptied.clear()
        self.released = False

    def _open_again(self, known: StateStore) -> StateStore:
        store = StateStore.open(self._settings.paths, direct=self._settings.direct)
        if store.stamp == known.stamp:
            return store
        store.close()
        raise StateError(
            f"{known.paths[0]} must be as it was at step {known.steps}, when it was unlocked, but another process has "
            "changed it: construct the optimizer again with resume=True"
        )

    def _empty(self) -> None:
        for tensor, _ in self._emptied:
            tensor.data = placeholder(tensor)
