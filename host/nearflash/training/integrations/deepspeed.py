"""A DeepSpeed configuration as an optimizer of ours and its keyword arguments.

    chosen = from_deepspeed("ds_config.json")
    optimizer = chosen.optimizer(model.parameters(), **chosen.options)

What is read: `optimizer`, `gradient_clipping`, `fp16`, `bf16`, `zero_optimization.offload_optimizer`. Keys of the
training loop, of DeepSpeed's own buffers and of `aio` have no effect here and are listed; any other key is an error.

Source: DeepSpeed's configuration JSON, as of 0.19.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.training.gradients.scaler import LossScale
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
_SCALARS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "amsgrad")
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
_LOOP = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_print",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_gradients", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "communication_data_type", "activation_checkpointing", "comms_logger",
    "flops_profiler", "tensorboard", "wandb", "csv_monitor",
)  # fmt: skip
"""The training script's business, or DeepSpeed's own."""
_PARTITIONS = (
    "stage", "offload_param", "sub_group_size", "overlap_comm", "contiguous_gradients", "reduce_scatter",
    "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size", "round_robin_gradients",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save",
)  # fmt: skip
_BUFFERS = ("buffer_count", "pin_memory", "pipeline_read", "pipeline_write", "fast_init")
_AIO = ("block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit", "overlap_events")


@dataclass(frozen=True)
class FromDeepSpeed:
    """What a configuration asks for."""

    optimizer: type[NearStorageOptimizer]
    options: dict[str, Any]
    """Keyword arguments of it; `device` and all that DeepSpeed does not know are the caller's to add."""
    without_effect: tuple[str, ...]
    """Keys that were given and mean nothing here, as `aio.block_size`."""


class _Block:
    """A part of the configuration; keys that were read are removed, so that the rest is unknown."""

    def __init__(self, content: Any, name: str = "") -> None:
        if not isinstance(content, Mapping):
            raise CommandError(f"{name or 'the configuration'} must be a block of keys, not {content!r}")
        self._left, self._name = dict(content), f"{name}." if name else ""
        self.idle: list[str] = []

    def take(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, default)
        if value == "auto":
            raise CommandError(f"{self._name}{key} must be a value, not 'auto': fill in what the Trainer would have")
        return value

    def block(self, key: str) -> "_Block":
        return _Block(self._left.pop(key, {}), self._name + key)

    def ignore(self, keys: tuple[str, ...]) -> None:
        self.idle += [f"{self._name}{key}" for key in keys if self._left.pop(key, None) is not None]

    def rest(self) -> list[str]:
        return [f"{self._name}{key}" for key in self._left]


def from_deepspeed(config: str | Path | Mapping[str, Any]) -> FromDeepSpeed:
    """Read a configuration (a JSON file, or its content). Raises CommandError, naming what it cannot do."""
    if isinstance(config, str | Path):
        try:
            config = json.loads(Path(config).read_text())
        except (OSError, ValueError) as error:
            raise CommandError(f"the configuration must be a readable JSON file, not {config!r}: {error}") from error
    top = _Block(config)
    blocks = [top]
    kind, options = _optimizer(top, blocks)
    options |= _state_path(top, blocks) | _precision(top, blocks)
    if clipping := top.take("gradient_clipping", 0.0):
        options["max_grad_norm"] = float(clipping)
    aio = top.block("aio")
    aio.ignore(_AIO)
    blocks.append(aio)
    top.ignore(_LOOP)
    if unknown := [key for block in blocks for key in block.rest()]:
        raise CommandError(
            f"configuration keys must be ones that are known here, not {', '.join(unknown)}; "
            "take them out, and do in the training script what they stand for"
        )
    return FromDeepSpeed(kind, options, tuple(key for block in blocks for key in block.idle))


def _optimizer(top: _Block, blocks: list[_Block]) -> tuple[type[NearStorageOptimizer], dict[str, Any]]:
    block = top.block("optimizer")
    name = block.take("type", "AdamW")
    if str(name).lower() not in _CLASSES:
        raise CommandError(f"optimizer.type must be one of {', '.join(_CLASSES)}, not {name!r}")
    kind, params = _CLASSES[str(name).lower()], block.block("params")
    blocks += [block, params]
    options = {key: value for key in _SCALARS if (value := params.take(key)) is not None}
    if not params.take("adam_w_mode", True):
        kind = NearStorageAdam
    params.ignore(("torch_adam", "bias_correction"))
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    return kind, options


def _state_path(top: _Block, blocks: list[_Block]) -> dict[str, Any]:
    zero = top.block("zero_optimization")
    offload = zero.block("offload_optimizer")
    device, path = offload.take("device", "none"), offload.take("nvme_path")
    if device != "nvme" or not path:
        raise CommandError(
            "zero_optimization.offload_optimizer must have the device 'nvme' and an nvme_path, "
            f"not {device!r} and {path!r}: that is where the state goes"
        )
    if (ratio := offload.take("ratio", 1.0)) != 1.0:
        raise CommandError(f"zero_optimization.offload_optimizer.ratio must be 1, not {ratio!r}: all of it is on flash")
    zero.ignore(_PARTITIONS)
    offload.ignore(_BUFFERS)
    blocks += [zero, offload]
    return {"path": str(path)}


def _precision(top: _Block, blocks: list[_Block]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, dtype in _PRECISIONS.items():
        block = top.block(name)
        blocks.append(block)
        enabled = block.take("enabled", False)
        if name == "fp16":
            scale = _loss_scale(block)
            options |= {"loss_scale": scale} if enabled else {}
        if enabled and options.setdefault("param_dtype", dtype) != dtype:
            raise CommandError("one of fp16 and bf16 must be enabled, not both")
    return options


def _loss_scale(fp16: _Block) -> LossScale | float:
    fixed, power = float(fp16.take("loss_scale", 0)), fp16.take("initial_scale_power", 16)
    window, hysteresis = fp16.take("loss_scale_window", 1000), fp16.take("hysteresis", 2)
    if (minimum := fp16.take("min_loss_scale", 1)) != 1:
        raise CommandError(f"fp16.min_loss_scale must be 1, not {minimum!r}")
    if fp16.take("consecutive_hysteresis", False) or fp16.take("auto_cast", False):
        raise CommandError("fp16.consecutive_hysteresis and fp16.auto_cast must be false; take them out")
    return fixed or LossScale(2.0**power, window=int(window), hysteresis=int(hysteresis))
