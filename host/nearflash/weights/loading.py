"""transformers models loaded from a checkpoint whose weights may be compressed, and may be more than memory holds."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module
from accelerate.utils.modeling import set_module_tensor_to_device
from torch import Tensor

from nearflash.abi.errors import CommandError, UnsupportedError, WeightsError
from nearflash.device import Device
from nearflash.weights.checkpoint import open_checkpoint
from nearflash.weights.empty import empty_model, name_errors
from nearflash.weights.file import WeightsTensor
from nearflash.weights.folder import ADAPTER, ModelFolder, open_folder
from nearflash.weights.on_device import DeviceExpander
from nearflash.weights.sources import Source, sources_of
from nearflash.weights.weights_map import WeightsMap, buffer_bytes

__all__ = ["load", "merge_adapter"]

_TENSORS_AHEAD = 3
"""Of the largest one's size: about a layer."""


def load(
    model_class: Any,
    path: Path | str,
    *,
    budget: int | None = None,
    device: str = "cpu",
    prefetch_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    expand_device: str | Device | None = None,
) -> Any:
    """The model of a folder with a config.json and a checkpoint, on `device`, ready for inference.

    model_class: AutoModelForCausalLM, or any of transformers' model classes.
    budget: bytes of memory that its weights may take; None: as many as there are. Within it come, in this order, what
    is not compressed, or is tied; memory to read, expand and prefetch in; the compressed tensors as they are stored;
    and dense ones in place of them, from the first layer on. Compressed tensors beyond it stay on disk, and each is
    read when its turn comes near.
    device: `cpu`, or `cuda` for torch's GPU.
    prefetch_bytes: dense tensors that are expanded before their turn; None: those of a layer, about.
    dtype: what it computes in; None: what most of the checkpoint is stored in.
    expand_device: an expand device beside the drive that the checkpoint lies on, by name or open, which reads and
    expands what is compressed (nearflash.weights.on_device); what a budget keeps in memory as it is stored the host
    expands.

    Weights are those that were compressed, to the bit; tensors are renamed, fused and tied as transformers does, and
    its settings of generation are the folder's; an adapter beside the weights is applied. Raises WeightsError where a
    tensor is missing, left over, damaged, or of another shape or kind than the model's, UnsupportedError where the
    folder asks for what is not done here (quantised weights, code of its own), before anything is loaded; CommandError
    for a budget that is too small. A tensor on disk is checked each time that it is read. Under a budget, adapters may
    be added with the model's own `load_adapter`; others that are left without memory, or that change weights on disk,
    raise UnsupportedError. FormatError, CommandError for weights that the expand device does not take.
    """
    _check_options(budget, device, prefetch_bytes)
    folder = open_folder(path, adapters=True)
    tensors = open_checkpoint(folder.path)
    if expand_device is not None:
        expander = DeviceExpander(expand_device)
        try:
            expander.check(tensors.values())
            tensors = {name: replace(tensor, expander=expander) for name, tensor in tensors.items()}
            model = _load(model_class, folder, tensors, budget, device, prefetch_bytes, dtype)
        except BaseException:
            expander.close()
            raise
        weakref.finalize(model, expander.close)
        return model
    return _load(model_class, folder, tensors, budget, device, prefetch_bytes, dtype)


def _load(
    model_class: Any, folder: ModelFolder, tensors: Mapping[str, WeightsTensor], budget: int | None, device: str,
    prefetch_bytes: int | None, dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    """The model of a folder's tensors."""
    model = empty_model(folder, tensors, dtype, model_class)
    sources = sources_of(model, tensors)
    placed = _place(
        sources, budget, prefetch_bytes, set((getattr(model, "all_tied_weights_keys", None) or {}).values())
    )
    direct = {name: source.pieces[0].tensor for name, source in sources.items() if source.is_one_tensor}
    with WeightsMap({n: tensor for n, tensor in direct.items() if n not in placed.offloaded}, device=device) as weights:
        for name, value in weights.items():
            set_module_tensor_to_device(model, name, device, value=value)
    for name in sources.keys() - direct.keys():
        made = torch.empty(sources[name].shape, dtype=sources[name].dtype)
        sources[name].read_into(made)
        set_module_tensor_to_device(model, name, device, value=made)
    model.tie_weights(recompute_mapping=False)
    if placed.offloaded:
        _offload(model, placed, device)
    for name, buffer in model.named_buffers():
        set_module_tensor_to_device(model, name, device, value=buffer)
    if folder.has_adapter:
        _apply_adapter(model, folder)
    return model.eval()


def _apply_adapter(model: Any, folder: ModelFolder) -> None:
    """Add the adapter beside a folder's weights. Raises WeightsError where its tensors are not the adapter's."""
    with name_errors(folder.path, ADAPTER):
        report = model.load_adapter(str(folder.path))
    if names := sorted(map(str, {*report.missing_keys, *report.unexpected_keys, *report.mismatched_keys})):
        raise WeightsError(
            f"{folder.path}: the tensors of its adapter must be those that {ADAPTER} asks for, but {names[0]!r} is "
            f"missing, left over or of another shape ({len(names)} such names): copy the adapter again"
        )


def merge_adapter(model: Any) -> None:
    """Make what `load` applied part of the weights, as peft does; for a model without an adapter nothing happens."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        return
    for name, module in reversed(list(model.named_modules())):  # inner ones first: adapters may be put around adapters
        owner, _, leaf = name.rpartition(".")
        if hasattr(model.get_submodule(owner), "unload_and_optionally_merge_module"):
            continue  # its wrapper's own part, which it unloads itself
        if hasattr(module, "unload_and_optionally_merge_module"):
            plain = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        elif hasattr(module, "base_layer") and hasattr(module, "merge"):
            module.merge()
            plain = module.get_base_layer()
        else:
            continue
        setattr(model.get_submodule(owner), leaf, plain)
    model._hf_peft_config_loaded = False
    del model.peft_config
    vars(model).pop("_weight_conversions", None)  # the adapter's: names of a saved model would be an adapter's, too


def _check_options(budget: int | None, device: str, prefetch_bytes: int | None) -> None:
    for name, value in (("budget", budget), ("prefetch_bytes", prefetch_bytes)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise CommandError(f"{name} must be a whole number of bytes, 0 or more, or None, not {value!r}")
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        where = torch.device("meta")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if where.type != "cpu" and not (where.type == "cuda" and (where.index or 0) < gpus):
        raise CommandError(f"device must be cpu, or cuda where torch has a GPU ({gpus} here), not {device!r}")


@dataclass(frozen=True)
class _Placed:
    """Places of the tensors that are not dense in memory; by their parameters' names."""

    offloaded: dict[str, WeightsTensor]
    """Expanded whenever their module runs."""
    in_memory: set[str]
    """Those whose stored bytes are kept."""
    prefetch_bytes: int


def _place(sources: Mapping[str, Source], budget: int | None, prefetch_bytes: int | None, shared: set[str]) -> _Placed:
    """As `load` describes it. shared: names of parameters that several modules have. Raises CommandError."""
    if budget is None:
        return _Placed({}, set(), 0)
    fixed = {_owner(name) for name, source in sources.items() if not source.is_one_tensor or name in shared}
    movable = {name: source.pieces[0].tensor for name, source in sources.items() if _owner(name) not in fixed}
    packed = {name: tensor for name, tensor in movable.items() if tensor.form != "dense"}
    largest = max((tensor.dense_bytes for tensor in packed.values()), default=0)
    ahead = _TENSORS_AHEAD * largest if prefetch_bytes is None else prefetch_bytes
    dense = sum(source.size_bytes for name, source in sources.items() if name not in packed)
    buffers = buffer_bytes(packed.values(), ahead) if packed else 0
    needed = dense + buffers
    if budget < needed:
        raise CommandError(f"budget must be {needed} bytes at least, {dense} for what is not compressed and {buffers} "
                           f"to read, expand and prefetch in, not {budget!r}: compress them (nearflash compress), "
                           "or read them layer by layer (nearflash generate --plan auto)")  # fmt: skip
    free_bytes, in_memory = budget - needed, set()
    for name, tensor in packed.items():
        if tensor.stored_bytes <= free_bytes:
            free_bytes -= tensor.stored_bytes
            in_memory.add(name)
    resident = set()
    for name, tensor in packed.items() if in_memory == packed.keys() else ():
        more = sources[name].size_bytes - tensor.stored_bytes
        if more <= free_bytes:
            free_bytes -= more
            resident.add(name)
    modules = {_owner(name) for name in packed.keys() - resident}
    offloaded = {name: tensor for name, tensor in movable.items() if _owner(name) in modules}
    return _Placed(offloaded, (in_memory | (offloaded.keys() - packed.keys())) - resident, ahead)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _offload(model: Any, placed: _Placed, device: str) -> None:
    """Give each module whose weights are not in memory a hook that brings them, and one that checks that it still does;
    the others one that checks what they are given.
    """
    weights = WeightsMap(placed.offloaded, placed.prefetch_bytes, placed.in_memory, device)
    weakref.finalize(model, weights.close)
    offloaded = {_owner(name) for name in placed.offloaded}
    for name, module in list(model.named_modules()):
        if name in offloaded:
            hook = AlignDevicesHook(device, offload=True, weights_map=_ModuleWeights(weights, name))
            add_hook_to_module(module, hook)
            parent = model.get_submodule(_owner(name))
            module.register_forward_pre_hook(_check_of(hook, parent, name.rpartition(".")[2]))
        elif next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(_check_inputs)


class _ModuleWeights(Mapping[str, Tensor]):
    """The tensors of one module, of a map of a model's."""

    def __init__(self, weights: WeightsMap, module: str) -> None:
        self._weights, self._prefix = weights, f"{module}."

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._weights if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def dataset(self) -> Any:
        """The part that peft would change when it merges an adapter. Raises UnsupportedError."""
        raise UnsupportedError(
            "weights that a budget leaves on disk cannot be merged with an adapter: load the model without budget, "
            "merge, and compress it again"
        )


def _check_of(hook: Any, parent: Any, leaf: str) -> Callable[[Any, Any], None]:
    """Raises UnsupportedError where a module's weights would not be brought, or what was put around it has no memory.

    peft makes an adapter where the weights beside it are, which is nowhere here: the result would be no number at all.
    """
    owner = weakref.ref(parent)

    def check(module: Any, inputs: Any) -> None:
        _check_inputs(module, inputs)
        now = getattr(module, "_hf_hook", None)
        if now is not hook and not (isinstance(now, SequentialHook) and hook in now.hooks):
            raise UnsupportedError(
                f"the hook of {leaf!r}, whose weights a budget leaves on disk, must stay: add others with "
                "add_hook_to_module(…, append=True), or load the model without budget"
            )
        around = getattr(owner(), leaf, module)
        if around is not module:
            own_parameters = {id(parameter) for parameter in module.parameters()}
            if empty := [
                n for n, value in around.named_parameters() if value.is_meta and id(value) not in own_parameters
            ]:
                raise _meta_error(f"{leaf}.{empty[0]}")

    return check


def _check_inputs(module: Any, inputs: Any) -> None:
    if any(isinstance(value, Tensor) and value.is_meta for value in inputs):
        raise _meta_error(f"what {type(module).__name__} is given")


def _meta_error(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"adapters of weights that a budget leaves on disk must have memory, but {what!r} has none: add them with "
        "model.load_adapter(folder) (LoRA without DoRA), or load the model without budget"
    )
