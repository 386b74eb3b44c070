"""Narrow state formats on the host's vectors; equals nearflash.model.update.state to the bit. The loops: update.cpp."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.optimizers.state import ROLES, StateFormat
from nearflash.support.native import find_address, load_library

__all__ = ["VectorState", "load_update_loops"]

F32: TypeAlias = NDArray[np.float32]
Stored: TypeAlias = list[NDArray[Any]]


class _Stored(ctypes.Structure):
    """`Stored` of update.cpp."""

    _fields_ = (
        ("role", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("elements", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


@cache
def load_update_loops() -> ctypes.CDLL:
    """The functions of update.cpp. Raises CompileError, ConfigError."""
    loops = load_library(Path(__file__).with_name("update.cpp"))
    loops.update_block.restype = loops.decode_state.restype = loops.encode_state.restype = None
    pointer, whole, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    loops.decode_state.argtypes = [pointer, whole, pointer]
    loops.encode_state.argtypes = [pointer, whole, pointer, word, whole]
    return loops


class VectorState:
    """Decodes and encodes one array ("m" or "v") of one step."""

    def __init__(self, role: str, state_format: StateFormat, step: int) -> None:
        self._role, self._format, self._step = role, state_format, step

    def decode(self, stored: Stored, out: F32) -> F32:
        """fp32 values (n,) of stored arrays: the elements (n,), and of mx8 the scales (n / 32,). May return a view."""
        if self._format is StateFormat.FP32:
            values: F32 = stored[0]
            return values
        record = self._record(stored)
        load_update_loops().decode_state(ctypes.byref(record), out.size, find_address(out))
        return out

    def encode(self, values: F32, first_param: int, out: Stored) -> None:
        """Store values (n,), the only NaN of which is the canonical one, of the parameters from `first_param` on."""
        if self._format is StateFormat.FP32:
            out[0][:] = values
            return
        record, place = self._record(out), find_address(values)
        load_update_loops().encode_state(ctypes.byref(record), values.size, place, self._step, first_param)

    def _record(self, stored: Stored) -> _Stored:
        elements, scales = stored[0], stored[1] if len(stored) > 1 else None
        places = find_address(elements), None if scales is None else find_address(scales)
        return _Stored(ROLES[self._role], self._format.code, *places)
