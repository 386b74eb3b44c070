"""A model's modules beside their tensors: classes, settings, adapters, and functions of the user's own.

Code of installed packages is known by the names of its classes. A function of the user's own (a subclass's `forward`, a
replaced one, a hook) is compared by its bytecode and by the numbers and tensors that it refers to.
"""

import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from nearflash.identity.plain import OPAQUE, digest_of, plain
from nearflash.identity.tensors import content_digest

__all__ = ["adapter_states", "find_unused_adapters", "is_recomputed", "module_states"]

_RUNTIME = {
    "name_or_path": "where the model was read",
    "warnings_issued": "what it has warned of",
    "hf_device_map": "where its parts lie",
    "all_tied_weights_keys": "tensors are compared by content, tied or not",
    "loss_type": "used in training",
    "gradient_checkpointing": "used in training",
}
"""Attributes of modules that decide no result, and why."""
_RECOMPUTED = ("inv_freq", "long_inv_freq", "max_seq_len_cached", "attention_scaling")
"""Of rotary positions whose frequencies follow the length of the text: the forward pass computes them again."""

_OURS = Path(__file__).parents[1]


def module_states(model: torch.nn.Module) -> dict[str, Any]:
    """Class, settings (public attributes of numbers and text) and own functions of each module, by its name."""
    classes: dict[type, Any] = {}
    left_out = tuple(find_unused_adapters(model))
    states = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if f"{name}.".startswith(left_out):
            continue
        kind = type(module)
        if kind not in classes:
            classes[kind] = [kind.__module__, kind.__qualname__, _own_functions(kind)]
        settings = {} if _adapters_of(module) else _settings(name, module)
        states[name] = [classes[kind], settings, _own_calls(module)]
    return states


def _settings(name: str, module: torch.nn.Module, unused: frozenset[str] = frozenset()) -> dict[str, Any]:
    settings = {}
    for key, value in vars(module).items():
        if key.startswith("_") or key in _RUNTIME or is_recomputed(module, key):
            continue
        if isinstance(value, dict):
            value = {adapter: kept for adapter, kept in value.items() if adapter not in unused}
        if (plain_value := plain(value)) is not OPAQUE:
            settings[key] = plain_value
        elif callable(value) and not isinstance(value, torch.nn.Module) and key != "forward":
            settings[key] = [getattr(value, "__qualname__", type(value).__qualname__), _function(value)]
    return settings


def is_recomputed(module: torch.nn.Module, leaf: str) -> bool:
    """Whether an attribute or buffer follows the text's length, as dynamic rotary positions do."""
    kinds = getattr(module, "rope_type", None)
    names = kinds.values() if isinstance(kinds, dict) else (kinds,)
    dynamic = any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in names)
    return dynamic and leaf.endswith(_RECOMPUTED) and not leaf.endswith("original_inv_freq")


# Adapters


def adapter_states(model: torch.nn.Module) -> dict[str, Any]:
    """For each adapted layer (peft): adapters in use, merged or not, whether disabled, and their settings."""
    states = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if adapters := _adapters_of(module):
            known, used, merged, disabled = adapters
            settings = _settings(name, module, frozenset(known - used))
            states[name] = [sorted(used), merged, disabled, settings]
    return states


def find_unused_adapters(model: torch.nn.Module) -> Iterator[str]:
    """Prefixes of names of what belongs to adapters that are loaded, but neither active nor merged."""
    for name, module in model.named_modules(remove_duplicate=False):
        if adapters := _adapters_of(module):
            known, used, *_ = adapters
            for attribute in _adapter_attributes(module):
                yield from (f"{name}.{attribute}.{adapter}." for adapter in known - used)


def _adapters_of(module: Any) -> tuple[set[str], set[str], list[str], bool] | None:
    """Adapters that an adapted layer knows and uses, those merged, and whether it is disabled; None for others."""
    if not hasattr(module, "adapter_layer_names") or not hasattr(module, "active_adapters"):
        return None
    parts = (getattr(module, attribute, None) for attribute in _adapter_attributes(module))
    known = {str(key) for part in parts if part is not None and hasattr(part, "keys") for key in part}
    merged = [str(adapter) for adapter in getattr(module, "merged_adapters", None) or ()]
    disabled = bool(getattr(module, "disable_adapters", False))
    active = set() if disabled else set(map(str, module.active_adapters))
    return known, active | set(merged), merged, disabled


def _adapter_attributes(module: Any) -> tuple[str, ...]:
    return (*module.adapter_layer_names, *(getattr(module, "other_param_names", None) or ()))


# Functions of the user's own


def _own_functions(kind: type) -> dict[str, Any]:
    functions = {}
    for base in kind.__mro__:
        for key, value in vars(base).items():
            for part in (value.fget, value.fset) if isinstance(value, property) else (value,):
                if function := _function(part):
                    functions[f"{base.__qualname__}.{key}"] = function
    return functions


def _own_calls(module: torch.nn.Module) -> list[Any]:
    """Replaced methods and hooks of a module."""
    replaced = [value for key, value in vars(module).items() if callable(value) and key in dir(type(module))]
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return [function for call in (*replaced, *hooks) if (function := _function(call))]


def _function(value: Any, calling: frozenset[CodeType] = frozenset()) -> list[Any]:
    """Bytecode, defaults, and what a function refers to: numbers, tensors, functions; nothing for installed code."""
    value = inspect.unwrap(getattr(value, "__func__", value))
    code = getattr(value, "__code__", None)
    if not isinstance(code, CodeType) or code in calling or _is_installed(code.co_filename):
        return []
    outside = {key: value.__globals__[key] for key in code.co_names if key in value.__globals__}
    for key, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
        try:
            outside[key] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    given = {str(number): item for number, item in enumerate(value.__defaults__ or ())} | (value.__kwdefaults__ or {})
    inner = calling | {code}
    return [_code(code), *({key: _describe(item, inner) for key, item in part.items()} for part in (outside, given))]


def _describe(value: Any, calling: frozenset[CodeType]) -> Any:
    if isinstance(value, torch.Tensor):
        return content_digest(value)
    if isinstance(value, FunctionType):
        return _function(value, calling)
    # Lists and the like may be what a hook counts or records: they are no settings.
    return plain(value) if isinstance(value, bool | int | float | str) else type(value).__qualname__


def _code(code: CodeType) -> str:
    inner = [_code(constant) if isinstance(constant, CodeType) else repr(constant) for constant in code.co_consts]
    digest = hashlib.sha256(code.co_code)
    digest.update(digest_of([inner, code.co_names, code.co_varnames, code.co_freevars]).encode())
    return digest.hexdigest()


@cache
def _is_installed(name: str) -> bool:
    file = Path(name)
    if name.startswith("<frozen") or file.is_relative_to(sysconfig.get_paths()["stdlib"]):
        return True
    return file.is_relative_to(_OURS) or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
