"""DeepSpeed's configuration: what it means here, what it does not, and that nothing is passed over in silence."""

import base64
import copy
import json
from pathlib import Path

import pytest
import torch

from nearflash.abi.errors import CommandError
from nearflash.training import LossScale, NearStorageAdam, NearStorageAdamW, NearStorageSGD
from nearflash.training.integrations.deepspeed import from_deepspeed
from nearflash.training.integrations.deepspeed_keys import IDLE, NEUTRAL, READ, rows

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.5,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "pin_memory": True},
    },
    "aio": {"block_size": 1048576, "queue_depth": 8},
}
FP16 = {key: value for key, value in CONFIG.items() if key != "bf16"}
GUIDE = Path(__file__).parents[3] / "docs" / "reference" / "deepspeed.md"


def changed(*keys, value):
    config = copy.deepcopy(CONFIG)
    block = config
    for key in keys[:-1]:
        block = block.setdefault(key, {})
    block[keys[-1]] = value
    return config


def test_a_whole_configuration(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    for config in (CONFIG, tmp_path / "ds.json", str(tmp_path / "ds.json")):
        chosen = from_deepspeed(config)
        assert chosen.optimizer is NearStorageAdamW
        assert chosen.options == {
            "lr": 1e-4, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1, "max_grad_norm": 0.5,
            "param_dtype": "bf16", "path": "/nvme",
        }  # fmt: skip
        assert set(chosen.without_effect) == {
            "train_micro_batch_size_per_gpu", "zero_optimization.stage", "zero_optimization.sub_group_size",
            "zero_optimization.offload_optimizer.buffer_count", "zero_optimization.offload_optimizer.pin_memory",
            "aio.block_size", "aio.queue_depth",
        }  # fmt: skip


def test_other_optimizers():
    coupled = from_deepspeed(changed("optimizer", value={"type": "Adam", "params": {"adam_w_mode": False}}))
    assert coupled.optimizer is NearStorageAdam
    assert from_deepspeed(changed("optimizer", value={"type": "Adam"})).optimizer is NearStorageAdamW
    sgd = from_deepspeed(changed("optimizer", value={"type": "SGD", "params": {"momentum": 0.9}}))
    assert sgd.optimizer is NearStorageSGD and sgd.options["momentum"] == 0.9


def test_loss_scales():
    fp16 = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 500, "hysteresis": 3}
    options = from_deepspeed(changed("bf16", value={"enabled": False}) | {"fp16": fp16}).options
    assert options["param_dtype"] == "fp16" and options["loss_scale"] == LossScale(1024.0, window=500, hysteresis=3)
    fixed = from_deepspeed(changed("bf16", value={}) | {"fp16": {"enabled": True, "loss_scale": 128}})
    assert fixed.options["loss_scale"] == 128.0
    assert "loss_scale" not in from_deepspeed(CONFIG).options


@pytest.mark.parametrize(
    "config, message",
    [
        (changed("optimiser", value={"type": "Adam"}), r"that DeepSpeed documents, not optimiser\.type;"),
        (changed("optimizer", "params", "beta3", value=1), "not optimizer.params.beta3;"),
        (changed("aio", "gds", value=True), r"not aio\.gds;"),
        (changed("scheduler", value={"type": "WarmupLR"}), r"scheduler\.type must be left out, .* torch\.optim\.lr_"),
        (changed("optimizer", "type", value="OneBitAdam"), "optimizer.type must be one of adam, .*, not 'OneBitAdam'"),
        (changed("optimizer", "params", "lr", value="1e-4"), r"optimizer\.params\.lr must be a number, not '1e-4'"),
        (changed("optimizer", "params", "betas", value=0.9), r"betas must be two numbers, not 0\.9"),
        (changed("optimizer", "params", "momentum", value=0.9), r"momentum must be left out, not 0\.9: AdamW has no"),
        (changed("optimizer", "params", "bias_correction", value=False), "bias_correction must be true, not False"),
        (changed("optimizer", "params", "max_grad_norm", value=1.0), r"not optimizer\.params\.max_grad_norm;"),
        (changed("zero_optimization", value={}), "must have the device 'nvme' and an nvme_path, not 'none' and None"),
        (changed("zero_optimization", "offload_optimizer", "ratio", value=0.5), "ratio must be 1, not 0.5"),
        (changed("fp16", value={"enabled": True}), "one of fp16 and bf16 must be enabled, not both"),
        (FP16 | {"fp16": {"enabled": True, "min_loss_scale": 4}}, "min_loss_scale must be 1, not 4"),
        (FP16 | {"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast must be false"),
        (changed("aio", value=3), "aio must be a block of keys, not 3"),
        (changed("gradient_clipping", value="1"), "gradient_clipping must be a number, not '1'"),
        (changed("bf16", value={"enabled": "true"}), r"bf16\.enabled must be true or false, not 'true'"),
        (changed("zero_optimization", "zero_quantized_gradients", value=True), "must be false, not True: compression"),
        (
            changed("amp", value={"enabled": True, "opt_level": "O1"}),
            r"amp\.enabled must be false, not True: use torch",
        ),
        (
            changed("compression_training", value={"weight_quantization": {"shared_parameters": {"enabled": True}}}),
            r"compression_training\..* must be false, not True",
        ),
        (changed("gradient_allreduce_op", value="sum"), 'gradient_allreduce_op must be "mean", not'),
        ({"optimizer": {"type": "Adam"}, 3: 4}, "configuration keys must be strings, not 3"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "must be given once, not enabled twice"),
        ([1], r"the configuration must be a block of keys, not \[1\]"),
        ("/no/such.json", "must be a readable JSON file, not '/no/such.json'"),
    ],
)
def test_what_cannot_be_done_is_named(config, message):
    with pytest.raises(CommandError, match=message):
        from_deepspeed(config)


@pytest.mark.parametrize("key", ["lr", "betas", "eps", "weight_decay"])
def test_auto_is_the_default(key):
    """As transformers writes it; the Trainer's arguments, or the caller, fill it in."""
    chosen = from_deepspeed(changed("optimizer", "params", key, value="auto"))
    assert chosen.auto == (f"optimizer.params.{key}",) and chosen.options.get(key) == {"weight_decay": 0.0}.get(key)


def test_a_configuration_of_autos():
    """The Trainer's own example: everything that it fills in is auto."""
    config = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}, "reduce_bucket_size": "auto",
            "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1e8}, "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True, "aio": {"queue_depth": 8},
        },
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False, "scheduler": None,
    }  # fmt: skip
    chosen = from_deepspeed(config)
    assert chosen.options == {"path": "/nvme", "weight_decay": 0.0} and chosen.optimizer is NearStorageAdamW
    assert {"gradient_clipping", "bf16.enabled", "optimizer.params.lr"} <= set(chosen.auto)
    everything = set(chosen.auto) | set(chosen.without_effect)
    assert {"scheduler", "train_batch_size", "zero_optimization.offload_param.nvme_path"} <= everything
    assert chosen.stream_blocks and not from_deepspeed(changed("optimizer", value=None)).stream_blocks


def test_where_parameters_are_offloaded_to():
    for device, streams in (("none", False), ("cpu", True)):
        given = changed("zero_optimization", "offload_param", value={"device": device})
        assert from_deepspeed(given).stream_blocks is streams
    with pytest.raises(CommandError, match=r"offload_param\.device must be 'none', 'cpu' or 'nvme', not 'tape'"):
        from_deepspeed(changed("zero_optimization", "offload_param", value={"device": "tape"}))


def test_deepspeeds_defaults_are_kept():
    """Its AdamW decays nothing unless told; torch's and ours decay by 0.01. Its AdamW decouples in any case."""
    bare = {"type": "AdamW", "params": {"adam_w_mode": False}}
    chosen = from_deepspeed(changed("optimizer", value=bare))
    assert chosen.optimizer is NearStorageAdamW and chosen.options["weight_decay"] == 0.0
    assert "optimizer.params.adam_w_mode" in chosen.without_effect
    torchs = from_deepspeed(changed("optimizer", value={"type": "AdamW", "params": {"torch_adam": True}}))
    assert "weight_decay" not in torchs.options
    lion = from_deepspeed(changed("optimizer", value={"type": "Lion"}))
    assert lion.options["betas"] == (0.9, 0.999) and lion.options["lr"] == 1e-3


def test_a_block_that_is_not_enabled_has_no_effect():
    config = changed("amp", value={"enabled": False, "opt_level": "O2"}) | {
        "fp16": {"enabled": False, "min_loss_scale": 4},
        "data_efficiency": {"data_sampling": {"num_epochs": 3}},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "bits": 8}}},
        "tensor_parallel": {"autotp_size": 1},
    }
    assert {"amp.opt_level", "fp16.min_loss_scale", "data_efficiency.data_sampling.num_epochs"} <= set(
        from_deepspeed(config).without_effect
    )


def test_every_way_to_hand_it_over(tmp_path):
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    text = json.dumps(CONFIG)
    (tmp_path / "ds.json").write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    for config in (text, encoded, HfDeepSpeedConfig(copy.deepcopy(CONFIG)), str(tmp_path / "ds.json")):
        assert from_deepspeed(config).options == from_deepspeed(CONFIG).options


def test_a_path_in_place_of_the_configurations(tmp_path):
    """Offloading to the processor's memory is the commonest configuration."""
    config = changed("zero_optimization", "offload_optimizer", value={"device": "cpu", "pin_memory": True})
    chosen = from_deepspeed(config, path=tmp_path)
    assert chosen.options["path"] == str(tmp_path)
    assert "zero_optimization.offload_optimizer.device" in chosen.without_effect


def test_keys_without_effect_are_listed():
    for key in (key for keys in IDLE.values() for key in keys):
        block = key.removesuffix(".*")
        value = 7 if block == key else {"enabled": True, "more": {"of": "it"}}
        assert block in from_deepspeed(changed(*block.split("."), value=value)).without_effect


@pytest.mark.parametrize("key", NEUTRAL)
def test_keys_that_change_results_are_refused(key):
    blocks = {"fp16": FP16 | {"fp16": {"enabled": True}}}
    *outer, name = key.removesuffix(".*").split(".") + ["more"] * key.endswith(".*")
    config = copy.deepcopy(blocks.get(outer[0] if outer else "", CONFIG))
    block = config
    for each in outer:
        block = block.setdefault(each, {})
    block[name] = "other"
    with pytest.raises(CommandError, match=f"{'.'.join([*outer, name])} must be .*, not 'other': "):
        from_deepspeed(config)
    for value in (*NEUTRAL[key][0], None, "auto"):
        block[name] = value
        from_deepspeed(config)


def test_the_table_of_the_guide():
    """`python -m nearflash.training.integrations.deepspeed_keys` writes it."""
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    assert lines == [str(row) for row in rows()] and len({row.key for row in rows()}) == len(lines)
    assert set(READ).isdisjoint(NEUTRAL)


def test_it_trains(tmp_path):
    tensor = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    chosen = from_deepspeed(changed("zero_optimization", "offload_optimizer", "nvme_path", value=str(tmp_path)))
    with chosen.optimizer([tensor], **chosen.options) as optimizer:
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        assert (
            optimizer.steps == 1
            and optimizer.report.grad_norm == 10
            and optimizer.store.path == tmp_path / "optimizer.state"
        )
