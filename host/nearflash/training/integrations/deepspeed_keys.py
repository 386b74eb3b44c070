"""Every key of a DeepSpeed configuration, and what becomes of it: read, without effect, or refused.

Keys are dotted, as `zero_optimization.offload_optimizer.ratio`; a name that ends in `.*` is of a whole block.

Source: DeepSpeed 0.19.6, its configuration page and the classes that parse the JSON.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["IDLE", "NEUTRAL", "READ", "DeepSpeedKey", "idle_reason", "neutral", "rows"]

_OPTIMIZER, _ZERO, _OFFLOAD = "optimizer.params.", "zero_optimization.", "zero_optimization.offload_optimizer."

READ = {
    "optimizer.type": "Adam, AdamW, Adagrad, Lion or SGD, in any case; without `optimizer` it is AdamW",
    **{f"{_OPTIMIZER}{name}": "option of that name" for name in ("lr", "betas", "eps", "weight_decay", "momentum",
                                                                "dampening", "nesterov", "lr_decay")},
    f"{_OPTIMIZER}adam_w_mode": "false with type Adam is NearStorageAdam; AdamW decouples in any case",
    f"{_OPTIMIZER}torch_adam": "true makes the default of weight_decay torch's (0.01 for AdamW)",
    "gradient_clipping": "`max_grad_norm`; 0 clips nothing",
    "fp16.enabled": '`param_dtype="fp16"` and a `loss_scale`; false: the block is without effect',
    "fp16.loss_scale": "fixed `loss_scale`; 0 makes it dynamic",
    "fp16.initial_scale_power": "`LossScale.scale` = 2^n", "fp16.loss_scale_window": "`LossScale.window`",
    "fp16.hysteresis": "`LossScale.hysteresis`",
    "bf16.enabled": '`param_dtype="bf16"`; false: the block is without effect', "bfloat16.*": "older name of bf16",
    f"{_OFFLOAD}device": '"nvme"; another one needs the argument `path`',
    f"{_OFFLOAD}nvme_path": "`path`, unless the argument `path` is given",
    f"{_ZERO}offload_param.device": '"nvme" or "cpu": `.stream_blocks` is true, see nearflash.training.blocks',
}  # fmt: skip
"""What it becomes, by key."""

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{_OPTIMIZER}amsgrad": ((False,), "no third moment is stored"),
    f"{_OPTIMIZER}bias_correction": ((True,), "the update corrects for the bias"),
    f"{_OPTIMIZER}fp32_optimizer_states": ((True,), 'choose narrower moments by state_format="bf16"'),
    "scheduler.*": ((), "make it in the training script, from torch.optim.lr_scheduler, and call its step()"),
    "gradient_allreduce_op": (("mean",), "average the gradients"),
    "fp16.auto_cast": ((False,), "cast the inputs in the training script"),
    "fp16.consecutive_hysteresis": ((False,), "LossScale counts overflows up to the next rise"),
    "fp16.min_loss_scale": ((1,), "LossScale falls to 1"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_optimizer_states": ((False,), 'choose narrower moments by state_format="bf16"'),
    "amp.enabled": ((False,), "use torch.amp in the training script"),
    "torch_autocast.enabled": ((False,), "use torch.amp.autocast in the training script"),
    f"{_ZERO}zero_quantized_weights": ((False,), "weights are not quantised"),
    f"{_ZERO}zero_quantized_nontrainable_weights": ((False,), "weights are not quantised"),
    f"{_ZERO}zero_quantized_gradients": ((False,), "compression=TopK(ratio) makes gradients smaller"),
    f"{_ZERO}zeropp_loco_param": ((), "compression=TopK(ratio) makes gradients smaller"),
    f"{_ZERO}zenflow": ((), "every step updates all parameters"),
    f"{_OFFLOAD}ratio": ((1,), "all of the state is on flash"),
    "curriculum_learning.enabled": ((False,), "order the data in the training script"),
    "data_efficiency.enabled": ((False,), "order the data in the training script"),
    "progressive_layer_drop.enabled": ((False,), "drop layers in the model"),
    "eigenvalue.enabled": ((False,), "it belongs to quantised training"),
    "compression_training.*": ((False,), "compress the model in the training script"),
    "quantize_training.*": ((False,), "quantise the model in the training script"),
    "weight_quantization.*": ((False,), "quantise the model in the training script"),
    "sparse_attention.*": ((), "choose the attention in the model"),
    "pipeline.*": ((), "parallelise the model in the training script"),
    "tensor_parallel.*": ((), "parallelise the model in the training script"),
    "expert_parallel.enabled": ((False,), "parallelise the model in the training script"),
    "hybrid_engine.enabled": ((False,), "generate in the training script"),
    "elasticity.enabled": ((False,), "choose the batch size in the training script"),
    "autotuning.enabled": ((False,), "write its result into the configuration"),
}
"""Values that change nothing, beside null and "auto", and the way out where another one is given."""

_LOOP, _MEMORY = "the training loop's", "memory and traffic of DeepSpeed's engine"
_REDUCTION, _LOGS = "how DeepSpeed averages gradients: DistributedDataParallel does", "logs and profiles"
_DISK = "DeepSpeed's own disk I/O: this store measures the drive"
_CHECKPOINT = "DeepSpeed's own checkpoints: see snapshots"

IDLE = {
    _LOOP: ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
            "managed_gradient_accumulation", "dataloader_drop_last", "vocabulary_size", "data_types.grad_accum_dtype",
            "data_types.param_dtype", "data_types.buffer_dtype"),
    _MEMORY: (*(f"{_ZERO}{name}" for name in (
        "stage", "allgather_partitions", "allgather_bucket_size", "sub_group_size", "cpu_offload", "cpu_offload_params",
        "cpu_offload_param", "cpu_offload_use_pin_memory", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "memory_efficient_linear", "override_module_apply", "leaf_module",
        "zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather", "legacy_stage1",
        "ignore_unused_parameters", "load_from_fp32_weights", "save_muon_momentum_buffer_in_memory",
        "enable_sanity_checks")),
        *(f"{_ZERO}offload_param.{name}" for name in (
            "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory")),
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
        "optimizer.legacy_fusion", f"{_OPTIMIZER}set_grad_none", f"{_OPTIMIZER}foreach", f"{_OPTIMIZER}fused",
        "activation_checkpointing.*", "compile.*", "graph_harvesting", "use_data_before_expert_parallelism",
        "bf16.immediate_grad_update", "bf16.check_grad_overflow", "bf16.check_overflow"),
    _REDUCTION: (*(f"{_ZERO}{name}" for name in (
        "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce", "overlap_comm",
        "contiguous_gradients", "round_robin_gradients", "grad_hooks")),
        "communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients",
        "gradient_predivide_factor", "sparse_gradients", "disable_allgather", "ddp_bf16"),
    _DISK: (*(f"{_OFFLOAD}{name}" for name in (
        "buffer_count", "buffer_size", "pin_memory", "pipeline_read", "pipeline_write", "pipeline", "fast_init",
        "super_offload", "cpuadam_cores_perc", "max_in_cpu")),
        *(f"{block}aio.{name}" for block in ("", _ZERO) for name in (
            "block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit", "overlap_events",
            "use_gds"))),
    _CHECKPOINT: ("checkpoint.*", "nebula.*", "datastates.*", f"{_ZERO}elastic_checkpoint",
                  f"{_ZERO}pipeline_loading_checkpoint"),
    _LOGS: ("steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "log_level", "timers.*",
            "comms_logger.*", "flops_profiler.*", "tensorboard.*", "wandb.*", "csv_monitor.*", "comet.*",
            f"{_ZERO}log_trace_cache_warnings"),
}  # fmt: skip
"""Keys that mean nothing here, by the reason."""

_REASONS = {key: reason for reason, keys in IDLE.items() for key in keys}


@dataclass(frozen=True)
class DeepSpeedKey:
    """A line of the table in docs/reference/deepspeed.md."""

    key: str
    outcome: str
    """`read`, `without effect` or `refused`."""
    meaning: str

    def __str__(self) -> str:
        return f"| `{self.key}` | {self.outcome} | {self.meaning} |"


def rows() -> Iterator[DeepSpeedKey]:
    """All keys."""
    yield from (DeepSpeedKey(key, "read", meaning) for key, meaning in READ.items())
    for key, (values, way_out) in NEUTRAL.items():
        unless = f" unless {' or '.join(map(json.dumps, values))}" if values else ""
        yield DeepSpeedKey(key, f"refused{unless}", way_out)
    yield from (DeepSpeedKey(key, "without effect", reason) for reason, keys in IDLE.items() for key in keys)


def idle_reason(key: str) -> str | None:
    """Why a key has no effect; None where it may have one."""
    return next((_REASONS[name] for name in _names(key) if name in _REASONS), None)


def neutral(key: str) -> tuple[tuple[Any, ...], str] | None:
    """Values of a key that change nothing, and the way out for others; None where nothing is known of it."""
    return next((NEUTRAL[name] for name in _names(key) if name in NEUTRAL), None)


def _names(key: str) -> list[str]:
    """The key, then the blocks that it lies in."""
    parts = key.split(".")
    blocks = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return [key, *(f"{block}.*" for block in blocks), *blocks[1:]]


if __name__ == "__main__":
    print("\n".join(map(str, rows())))
