"""A kernel's top, compiled with g++ and called through a C ABI: one 64-bit word an argument."""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from nearflash.abi.errors import DeviceError
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.sim.hls.build import build_shim, shim

__all__ = ["HlsLibrary"]


class HlsLibrary:
    """The function `name` of a shared library that was built with hls_kernel.cpp."""

    def __init__(self, path: Path, name: str) -> None:
        self._name, self._library = name, ctypes.CDLL(str(path))
        self._library.hls_run.restype, self._library.hls_run.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._arguments: int = self._library.hls_arguments()

    @classmethod
    def build(
        cls,
        name: str,
        text: str,
        config: UpdateConfig,
        *,
        real: str = "float",
        folder: Path | None = None,
        defines: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Self:
        """Compile the C++ text `text` with its function `name` for the lanes and ports of `config`.

        real: scalar type of the lanes, `float` (the host's) or `Fp32` (what is synthesised). folder: of a user's
        headers. defines, files: more of both. Raises CompileError.
        """
        values = {"KERNEL": name, "KERNEL_FILE": '"kernel.cpp"', "NEARFLASH_REAL": real,
                  "NEARFLASH_CONFIG": config.full_name.replace("-", "_")} | dict(defines or {})  # fmt: skip
        path = build_shim(name, shim("hls_kernel.cpp"), defines=values, files={"kernel.cpp": text, **(files or {})},
                          include=[folder] if folder else [])  # fmt: skip
        return cls(path, name)

    def run(self, words: Sequence[int]) -> None:
        """Call the kernel: addresses in this process, numbers, bits of fp32 scalars, in the order of its arguments.

        Raises DeviceError with what a stage threw (a stream that stays empty or full).
        """
        if len(words) != self._arguments:
            raise ValueError(f"{self._name} must get {self._arguments} arguments, not {len(words)}")
        array = np.array(words, np.uint64)
        error = self._library.hls_run(array.ctypes.data)
        if error is not None:
            raise DeviceError(f"HLS kernel {self._name}: {error.decode()}")
