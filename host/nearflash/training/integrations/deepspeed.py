"""A DeepSpeed configuration as an optimizer of ours and its keyword arguments.

    chosen = from_deepspeed("ds_config.json")
    optimizer = chosen.optimizer(model.parameters(), **chosen.options)

What is read: `optimizer`, `gradient_clipping`, `fp16`, `bf16`, `offload_optimizer` and `offload_param`. Other keys have
no effect and are listed, or change results and are rejected with a named error: `deepspeed_keys` has all of them.
"auto" and null stand for the default. Options that `optimizer.params` leaves out have DeepSpeed's defaults.

Source: DeepSpeed's configuration JSON, as of 0.19.
"""

import base64
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.support.files import read_text
from nearflash.training.gradients.scaler import LossScale
from nearflash.training.integrations.deepspeed_keys import NEUTRAL, READ, idle_reason, neutral
from nearflash.training.optimizers.adagrad import NearStorageAdagrad
from nearflash.training.optimizers.adam import NearStorageAdam, NearStorageAdamW
from nearflash.training.optimizers.lion import NearStorageLion
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.optimizers.sgd import NearStorageSGD

__all__ = ["FromDeepSpeed", "from_deepspeed"]

_CLASSES = {
    "adam": NearStorageAdamW,  # DeepSpeed's Adam decouples weight decay unless adam_w_mode is false
    "adamw": NearStorageAdamW,
    "adagrad": NearStorageAdagrad,
    "lion": NearStorageLion,
    "sgd": NearStorageSGD,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "adam": {"weight_decay": 0.0},
    "adamw": {"weight_decay": 0.0},
    "lion": {"lr": 1e-3, "betas": (0.9, 0.999)},
}
"""DeepSpeed's, where they are not those of our optimizers."""
_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "dampening", "lr_decay")
_SCALARS = (*_NUMBERS, "betas", "nesterov")
_PARAMS, _OFFLOAD = "optimizer.params.", "zero_optimization.offload_optimizer."
_PARAM = "zero_optimization.offload_param."


@dataclass(frozen=True)
class FromDeepSpeed:
    """Optimizer arguments that a configuration asks for."""

    optimizer: type[NearStorageOptimizer]
    options: dict[str, Any]
    """Keyword arguments of it; `device` and all that DeepSpeed does not know are the caller's to add."""
    without_effect: tuple[str, ...]
    """Keys that were given and mean nothing here, as `aio.block_size`."""
    auto: tuple[str, ...]
    """Keys that were "auto", for which the default holds unless the caller adds the option."""
    stream_blocks: bool
    """Whether parameters are offloaded: nearflash.training.blocks.stream_blocks(model, optimizer) does that here."""


def from_deepspeed(config: Any, *, path: str | Path | None = None) -> FromDeepSpeed:
    """Read a configuration: its content, a JSON file, its text or that in base64, or a transformers HfDeepSpeedConfig.

    path: of the state, in place of the configuration's nvme_path. Raises CommandError, naming what it cannot do.
    """
    given = _Given(dict(_leaves(_content(config))))
    kind, options = _optimizer(given)
    options |= _precision(given) | {"path": _path(given, path)}
    if clipping := given.number("gradient_clipping", 0.0):
        options["max_grad_norm"] = clipping
    offloads = _offloads_parameters(given)
    given.check()
    return FromDeepSpeed(kind, options, tuple(given.idle), tuple(given.auto), offloads)


class _Given:
    """The keys of a configuration; those that were read are taken out, so that the rest can be checked."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self.keys = frozenset(leaves)
        self.auto = [key for key, value in leaves.items() if value == "auto" and key in READ]
        self.idle = [key for key, value in leaves.items() if value is None or (value == "auto" and key not in READ)]
        self._left = {key: value for key, value in leaves.items() if key not in (*self.auto, *self.idle)}

    def take(self, key: str, default: Any = None) -> Any:
        return self._left.pop(key, default)

    def number(self, key: str, default: float) -> float:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CommandError(f"{key} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise CommandError(f"{key} must be true or false, not {value!r}")
        return value

    def disable(self, block: str) -> None:
        """Take out what is left of a block that is not enabled."""
        named = [key for key in self._left if key.startswith(f"{block}.")]
        self.idle += [key for key in named if self._left.pop(key) is not None]

    def check(self) -> None:
        """Sort what was not read into what has no effect, what is refused, and what DeepSpeed does not know."""
        for flag in (key for key in NEUTRAL if key.endswith(".enabled")):
            if self._left.get(flag, False) is False:
                self.disable(flag.removesuffix(".enabled"))
        unknown = []
        for key, value in self._left.items():
            known = neutral(key)
            if known is None and idle_reason(key) is None:
                unknown.append(key)
            elif known is not None and value not in known[0] and not _is_off(key, value, self._left):
                rule = " or ".join(json.dumps(choice) for choice in known[0]) or "left out"
                raise CommandError(f"{key} must be {rule}, not {value!r}: {known[1]}")
            else:
                self.idle.append(key)
        if unknown:
            raise CommandError(
                f"configuration keys must be ones that DeepSpeed documents, not {', '.join(unknown)}; take them out, "
                "and do in the training script what they stand for"
            )


def _is_off(key: str, value: Any, left: Mapping[str, Any]) -> bool:
    """Whether a key is of a block whose parts are all not enabled, or a size of 1."""
    top = key.partition(".")[0]
    flags = [flag for name, flag in left.items() if name.startswith(f"{top}.") and name.endswith("enabled")]
    return (bool(flags) and not any(flags)) or (key.endswith("_size") and value == 1)


def _content(config: Any) -> Mapping[str, Any]:
    config = getattr(config, "config", config)
    if isinstance(config, str | Path):
        try:
            config = json.loads(_text(config), object_pairs_hook=_without_duplicates)
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, CommandError):
                raise
            shown = str(config) if len(str(config)) < 200 else f"{str(config)[:200]}…"
            raise CommandError(f"the configuration must be a readable JSON file, not {shown!r}: {error}") from error
    if not isinstance(config, Mapping):
        raise CommandError(f"the configuration must be a block of keys, not {config!r}")
    return config


def _text(config: str | Path) -> str:
    """Text of a file; or JSON itself, or that in base64, as transformers' command lines take it."""
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return config
    if isinstance(config, str) and not config.endswith(".json"):
        try:
            text = base64.b64decode(config, altchars=b"-_", validate=True).decode()
            if text.lstrip().startswith("{"):
                return text
        except ValueError:
            pass  # it is a path
    return read_text(Path(config))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise CommandError(f"configuration keys must be given once, not {twice[0]} twice: take one of them out")
    return dict(pairs)


def _leaves(block: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is no block, or an empty one."""
    for key, value in block.items():
        if not isinstance(key, str):
            raise CommandError(f"configuration keys must be strings, not {key!r}")
        if f"{name}{key}" in _BLOCKS and not isinstance(value, Mapping) and value is not None:
            raise CommandError(f"{name}{key} must be a block of keys, not {value!r}")
        if isinstance(value, Mapping) and f"{name}{key}" not in READ and idle_reason(f"{name}{key}") is None:
            yield from _leaves(value, f"{name}{key}.")
        elif not isinstance(value, Mapping) or value:
            yield f"{name}{key}", value


_BLOCKS = {key.rpartition(".")[0] for key in READ} | {"aio", "optimizer", "zero_optimization"}


def _optimizer(given: _Given) -> tuple[type[NearStorageOptimizer], dict[str, Any]]:
    name = given.take("optimizer.type")
    if name is not None and str(name).lower() not in _CLASSES:
        raise CommandError(f"optimizer.type must be one of {', '.join(_CLASSES)}, not {name!r}")
    chosen = str(name or "adamw").lower()
    kind, options = _CLASSES[chosen], dict(_DEFAULTS.get(chosen, {})) if name is not None else {}
    if chosen != "adam" and f"{_PARAMS}adam_w_mode" in given.keys:
        given.idle.append(f"{_PARAMS}adam_w_mode")
    decoupled, torch_adam = given.flag(f"{_PARAMS}adam_w_mode", True), given.flag(f"{_PARAMS}torch_adam", False)
    if chosen == "adam" and not decoupled:
        kind = NearStorageAdam
    elif torch_adam:
        options.pop("weight_decay", None)
    if f"{_PARAMS}lr" in given.auto:
        options.pop("lr", None)
    accepted = inspect.signature(kind).parameters
    for key in _SCALARS:
        if (value := given.take(f"{_PARAMS}{key}")) is not None:
            if key not in accepted:
                raise CommandError(f"{_PARAMS}{key} must be left out, not {value!r}: {name} has no such parameter")
            options[key] = _scalar(f"{_PARAMS}{key}", value)
    return kind, options


def _scalar(key: str, value: Any) -> Any:
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    of_pair, boolean = key.endswith("betas"), key.endswith("nesterov")
    right = isinstance(value, list | tuple) == of_pair and len(numbers) == 1 + of_pair
    if not right or any(
        isinstance(number, bool) != boolean or not isinstance(number, int | float) for number in numbers
    ):
        rule = "two numbers" if of_pair else "true or false" if boolean else "a number"
        raise CommandError(f"{key} must be {rule}, not {value!r}")
    return tuple(numbers) if of_pair else value


def _path(given: _Given, path: str | Path | None) -> str:
    device, stored = given.take(f"{_OFFLOAD}device", "none"), given.take(f"{_OFFLOAD}nvme_path")
    if path is None and (device != "nvme" or not isinstance(stored, str) or not stored):
        raise CommandError(
            f"zero_optimization.offload_optimizer must have the device 'nvme' and an nvme_path, not {device!r} and "
            f"{stored!r}: that is where the state goes; or pass path= to from_deepspeed"
        )
    if path is not None:
        given.idle += [f"{_OFFLOAD}{key}" for key in ("device", "nvme_path") if f"{_OFFLOAD}{key}" in given.keys]
    return str(path if path is not None else stored)


def _offloads_parameters(given: _Given) -> bool:
    device = given.take(f"{_PARAM}device", "none")
    if device not in ("none", "cpu", "nvme"):
        raise CommandError(f"{_PARAM}device must be 'none', 'cpu' or 'nvme', not {device!r}: take it out")
    return bool(device != "none")


def _precision(given: _Given) -> dict[str, Any]:
    enabled = {}
    for block in ("fp16", "bf16", "bfloat16"):
        enabled[block] = given.flag(f"{block}.enabled", False)
        if not enabled[block]:
            given.disable(block)
    if enabled["fp16"] and (enabled["bf16"] or enabled["bfloat16"]):
        raise CommandError("one of fp16 and bf16 must be enabled, not both")
    if enabled["fp16"]:
        return {"param_dtype": "fp16", "loss_scale": _loss_scale(given)}
    return {"param_dtype": "bf16"} if enabled["bf16"] or enabled["bfloat16"] else {}


def _loss_scale(given: _Given) -> LossScale | float:
    fixed, power = given.number("fp16.loss_scale", 0.0), given.number("fp16.initial_scale_power", 16)
    window, hysteresis = given.number("fp16.loss_scale_window", 1000), given.number("fp16.hysteresis", 2)
    if abs(power) > 127:
        raise CommandError(f"fp16.initial_scale_power must be at most 127, not {power:g}")
    return fixed or LossScale(2.0**power, window=int(window), hysteresis=int(hysteresis))
