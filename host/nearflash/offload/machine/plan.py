"""The plan for a model on this machine: its shape from its folder, the machine as it was measured, the best policy."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError, PlanError
from nearflash.offload.machine.machine_file import keep_machine, load_kept_machine
from nearflash.planning.profile import Machine
from nearflash.planning.search import Plan, Space, Workload, search
from nearflash.planning.shapes import ModelShape
from nearflash.storage.state.safetensors import ITEM_BYTES
from nearflash.support.threads import idle_processors
from nearflash.weights.checkpoint import INDEX, SINGLE, open_checkpoint
from nearflash.weights.file import WeightsTensor
from nearflash.weights.folder import CONFIG, FLOATING, SMOLLM2, ModelFolder, open_folder
from nearflash.weights.folder import read_config as read_file

__all__ = ["crossing_fraction", "machine_here", "model_shape", "plan_here"]


def plan_here(
    model: Path, workload: Workload, sequences: int, folder: Path, memory: Mapping[str, float] | None = None, *,
    again: bool = False, read_fraction: float = 1.0,
) -> Plan:  # fmt: skip
    """The fastest plan for a model's folder on this machine, which is measured where it never was, or `again`.

    sequences: prompts that there are. folder: on the drive that is used. memory: bytes to fill at most, as
    `Machine.with_memory` names them. read_fraction: of K and V, by attention. Raises PlanError where nothing fits.
    """
    shape, stored_fraction = model_shape(model)
    machine, _ = machine_here(model, shape, folder, stored_fraction, again=again)
    space = Space(max_sequences=sequences, stored_fraction=stored_fraction, read_fraction=read_fraction,
                  crossing_fraction=crossing_fraction(model))  # fmt: skip
    return search(shape, machine.with_memory(**(memory or {})), workload, space)


def machine_here(
    model: Path, shape: ModelShape, folder: Path, stored_fraction: float = 1.0, *, again: bool = False
) -> tuple[Machine, Path | None]:
    """This machine for a model: as it was kept for its shape, dtype and form of weights, or measured now (always, with
    `again`); and its file, where that is new.

    What is measured beside other work is used now, with a RuntimeWarning, and not kept: rates of a busy machine would
    be believed later.
    """
    config = read_config(model)
    dtype = config.get("dtype") or config.get("torch_dtype")
    what = f"{dtype or 'default'}{shape.digest()[:12]}" + (f"{stored_fraction:.2f}" if stored_fraction < 1 else "")
    if not again and (kept := load_kept_machine(folder, what)) is not None:
        return kept, None
    from nearflash.offload.machine.measure import measure_machine  # which loads torch

    print("measuring this machine for the model: half a minute where no other program computes", file=sys.stderr)
    idle, processors = idle_processors(), len(os.sched_getaffinity(0))
    machine = measure_machine(folder, dtype, (model, shape))
    if idle < processors:
        warnings.warn(
            f"other programs took {processors - idle} of {processors} processors while this machine was measured: it "
            "is faster than predicted when they have ended, and was not kept",
            RuntimeWarning,
            stacklevel=2,
        )
        return machine, None
    return machine, keep_machine(machine, folder, what)


def model_shape(model: Path) -> tuple[ModelShape, float]:
    """The shape of the model in a folder, a config.json or SMOLLM2, and the fraction of their bytes that weights take.

    As transformers builds it, without memory; a checkpoint beside the config says in what dtype it computes, and what
    of it is compressed. Raises PlanError, UnsupportedError for what transformers does not build, and WeightsError for a
    damaged checkpoint.
    """
    folder = _open_model(model)
    from nearflash.offload.machine.shape import measure_shape  # which loads torch

    shape, tensors = measure_shape(folder), _open_tensors(folder)
    if not tensors:
        return shape, 1.0
    if odd := [tensor for name, tensor in tensors.items() if name.endswith("weight") and tensor.dtype not in FLOATING]:
        raise odd[0].error(
            f"its dtype must be one of {', '.join(FLOATING)}, not {odd[0].dtype}: take the checkpoint that is not "
            "quantised"
        )
    shape = replace(shape, element_bytes=_element_bytes(tensors.values(), shape.element_bytes))
    return shape, _fraction_of_dense(tensors, lambda tensor: tensor.stored_bytes)


def crossing_fraction(model: Path) -> float:
    """The fraction of their bytes that weights take over a link to a GPU (nearflash.weights.crossing)."""
    from nearflash.weights.crossing import crossing_bytes  # which loads torch

    return _fraction_of_dense(_open_tensors(_open_model(model)), crossing_bytes)


def _open_tensors(folder: ModelFolder) -> Mapping[str, WeightsTensor]:
    """The tensors of a checkpoint by name; none where there is none, or another program's."""
    if folder.gguf is not None or not any((folder.path / name).is_file() for name in (SINGLE, INDEX)):
        return {}
    return open_checkpoint(folder.path)


def _fraction_of_dense(tensors: Mapping[str, WeightsTensor], size: Callable[[WeightsTensor], int]) -> float:
    """Bytes over the dense ones, of matrices of layers, whose names hold a number: they are what is compressed."""
    matrices = [tensor for name, tensor in tensors.items() if re.search(r"\.\d+\.", name) and len(tensor.shape) > 1]
    if all(tensor.form == "dense" for tensor in matrices):
        return 1.0
    return min(1.0, sum(map(size, matrices)) / sum(tensor.dense_bytes for tensor in matrices))


def _element_bytes(tensors: Iterable[WeightsTensor], otherwise: int) -> int:
    """Bytes of the floating-point dtype that most of a checkpoint is in, which the model computes in."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in FLOATING:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.dense_bytes
    return ITEM_BYTES[max(sizes, key=lambda dtype: sizes[dtype])] if sizes else otherwise


def read_config(model: Path) -> Mapping[str, Any]:
    """The configuration of a model's folder, of a config.json itself, or of SMOLLM2. Raises as `model_shape`."""
    folder = _open_model(model)
    if folder.gguf is not None:
        from nearflash.weights.empty import load_config  # which loads torch

        config: dict[str, Any] = load_config(folder).to_dict()
        return config
    return folder.config


def _open_model(model: Path) -> ModelFolder:
    try:
        if str(model) == SMOLLM2 or model.is_dir() or model.name == CONFIG or model.suffix == ".gguf":
            return open_folder(model.parent if model.name == CONFIG else model, gguf=True)
        return ModelFolder(model, read_file(model))
    except (OSError, ValueError, CommandError) as error:
        message = f"model must be a folder with {CONFIG}, or one itself, not {str(model)!r}: {error}"
        raise PlanError(message) from None
