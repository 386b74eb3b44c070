"""Weights from a drive into a GPU's memory without the host's, by kvikio (NVIDIA's cuFile), where both are there.

    pinned    drive ─► pinned buffer of the host ─► GPU
    direct    drive ─► GPU (GPUDirect Storage)

kvikio without GPUDirect Storage copies through buffers of its own, so that the pinned path is taken then. Tensors with
a checksum are read by the host the first time, which checks them.

Limits: written to kvikio 26.10's documentation. Its reads into a GPU have not been run: tests have a stand-in that
reads the same ranges of the same files into host memory.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from nearflash.abi.errors import WeightsError
from nearflash.offload.tiers.link import DeviceLink
from nearflash.offload.weights.layout import BufferLayout, FileRun
from nearflash.storage.io.unchanged import UnchangedFile

__all__ = ["DirectReader", "choose_reader"]


class DirectReader:
    """Fills a GPU's buffers by layouts; its files stay open until it is closed. kvikio: the module."""

    def __init__(self, kvikio: Any) -> None:
        self._open_file: Callable[[str, str], Any] = kvikio.CuFile
        self._files: dict[int, tuple[UnchangedFile, Any]] = {}

    def takes(self, layout: BufferLayout) -> bool:
        """Whether a layer is read from whole files, in whole blocks and as it is stored, and needs no check."""
        whole = all(type(run.file) is UnchangedFile and not run.exact for run in layout.runs)
        return whole and layout.is_checked and not layout.expanded and not layout.compressed.work_bytes

    def read_runs(self, layout: BufferLayout, memory: Tensor) -> int:
        """Read a layer into a buffer (size_bytes,) uint8; its bytes. Raises WeightsError as LayoutReader does."""
        parts = [part for run in layout.runs for part in run.parts()]
        begun = [(part, self._begin(part, memory)) for part in parts]
        for part, future in begun:
            self._finish(part, future)
        return sum(part.size_bytes for part in parts)

    def close(self) -> None:
        """Close the files; may be called twice."""
        while self._files:
            self._files.popitem()[1][1].close()

    def _begin(self, part: FileRun, memory: Tensor) -> Any:
        view = memory[part.buffer_offset : part.buffer_offset + part.size_bytes]
        try:
            return self._file(part.file).pread(view, part.size_bytes, part.offset)
        except (OSError, RuntimeError) as error:
            raise _reading_error(part, error) from error

    def _finish(self, part: FileRun, future: Any) -> None:
        try:
            done = future.get()
            part.file.check()
        except (OSError, RuntimeError) as error:
            raise _reading_error(part, error) from error
        if done < part.size_bytes:
            raise part.short_error(done)

    def _file(self, file: UnchangedFile) -> Any:
        """kvikio's file of one that is open, by its descriptor: the name may be another file's by now."""
        if id(file) not in self._files:
            self._files[id(file)] = file, self._open_file(f"/proc/self/fd/{file.descriptor(direct=False)}", "r")
        return self._files[id(file)][1]


def _reading_error(part: FileRun, error: Exception) -> WeightsError:
    return WeightsError(f"{part.file.path}: reading {part.what!r} failed ({error})")


def choose_reader(
    link: DeviceLink, direct: bool, load: Callable[[str], Any] = import_module
) -> tuple[DirectReader | None, str]:
    """The reader, or None for the pinned path, and a sentence which of them and why; empty where a processor computes.

    direct: past the page cache, which this is. load: imports a module.
    """
    if link.device.type == "cpu":
        return None, ""
    if not direct:
        return None, "weights: through pinned memory, as reads are buffered"
    try:
        kvikio, driver = load("kvikio"), load("kvikio.cufile_driver")
        available = driver.get("is_gds_available")
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"weights: through pinned memory, as there is no kvikio ({str(error).splitlines()[0]})"
    if not available:
        return None, "weights: through pinned memory, as there is no GPUDirect Storage here (nvidia-fs, cuFile)"
    return DirectReader(kvikio), "weights: from the drive into the GPU's memory, by cuFile"
